// What the ranks of a world know and nobody else: TANDEM_SECRET, or the contents of the file that
// TANDEM_SECRET_FILE names. Where all ranks are on one host they need none (endpoint.h).
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "comm/rendezvous/handshake.h"

namespace tandem::control {

struct Secret {
  Digest key{};        ///< of its text; zeros where there is none
  std::string source;  ///< the variable that it came from, for errors; empty: there is none
};

/// Of TANDEM_SECRET's value and TANDEM_SECRET_FILE's, empty where they are not set. Throws
/// InvalidArgument for both, for one of fewer than 16 bytes, and for a file that is no plain file,
/// is not this user's or is open to others; IoError for one that cannot be read. No error has the
/// secret in it.
Secret read_secret(const std::string& text, const std::string& file);
/// From the environment.
Secret secret_of_environment();

/// From the system's generator.
Digest random_digest();
std::string hex_of(std::span<const std::byte> bytes);

/// For the ranks of the world, or of the group, that is called `world`.
Credentials credentials_of(const Secret& secret, std::string_view world);

}  // namespace tandem::control
