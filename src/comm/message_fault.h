// Faults for tests: a flipped bit in a message to another process, as a network would leave it.
#pragma once

#include <cstdint>

namespace tandem {

/// Flips this bit, modulo its number of bits, of the contents of the next message of at least
/// `min_bytes`, 1 or more, that this process sends over a socket, after it was hashed; `in_header`:
/// of the header of the next one that it receives.
void flip_bit_of_next_message(uint32_t bit, uint64_t min_bytes = 1, bool in_header = false);
/// Bit to flip in a message of `bytes` that is sent now; -1: none.
int64_t take_bit_to_flip(uint64_t bytes);
/// Bit to flip in the header of a message of `bytes` that is received now; -1: none.
int64_t take_header_bit(uint64_t bytes);

}  // namespace tandem
