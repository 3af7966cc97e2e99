// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104), by which ranks authenticate each other.
// Implemented here since it is the only cryptography, used a few hundred times a run, and a library
// would be a further dependency of every project that uses Tandem. Run time does not depend on the
// data.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace tandem {

using Digest = std::array<std::byte, 32>;

Digest sha256(std::span<const std::byte> text);
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> text);
/// Run time does not depend on the position of a difference.
bool equal_in_constant_time(const Digest& a, const Digest& b);

}  // namespace tandem
