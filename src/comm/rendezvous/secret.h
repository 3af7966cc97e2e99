// Secret known only to the ranks of a world: TANDEM_SECRET, or the contents of the file that
// TANDEM_SECRET_FILE names. Ranks that are all on one host need none (endpoint.h).
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "comm/rendezvous/handshake.h"

namespace tandem::control {

struct Secret {
  Digest key{};        ///< digest of its text; zeros if there is none
  std::string source;  ///< variable that it came from, for errors; empty: there is none
};

/// Reads the secret from the values of TANDEM_SECRET and TANDEM_SECRET_FILE, empty if not set.
/// Throws InvalidArgument if both are set, for fewer than 16 or more than 4096 bytes, and for a
/// file that is not a regular file, belongs to another user or is open to others; IoError if it
/// cannot be read. No error contains the secret.
Secret read_secret(const std::string& text, const std::string& file);
/// Reads the secret from the environment.
Secret secret_of_environment();

/// Random bytes from the system's generator.
Digest random_digest();
std::string hex_of(std::span<const std::byte> bytes);

/// Credentials of the ranks of the world or group named `world`.
Credentials credentials_of(const Secret& secret, std::string_view world);

}  // namespace tandem::control
