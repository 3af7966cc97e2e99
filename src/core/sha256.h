// SHA-256 (FIPS 180-4) and HMAC (RFC 2104) on it, for the proofs that ranks give each other.
// Written out: it is the only cryptography here, a few hundred times a run, and a library for it
// would be one that every project with Tandem inside has to find, too. Its time does not depend on
// the data.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace tandem {

using Digest = std::array<std::byte, 32>;

Digest sha256(std::span<const std::byte> text);
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> text);
/// In a time that says nothing about where they differ.
bool equal_in_constant_time(const Digest& a, const Digest& b);

}  // namespace tandem
