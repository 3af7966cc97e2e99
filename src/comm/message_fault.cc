#include "comm/message_fault.h"

#include <atomic>

namespace tandem {
namespace {

std::atomic<int64_t> bit_to_flip{-1};
std::atomic<uint64_t> min_message_bytes{1};

}  // namespace

void flip_bit_of_next_message(uint32_t bit, uint64_t min_bytes) {
  min_message_bytes = min_bytes;
  bit_to_flip = bit;
}

int64_t take_bit_to_flip(uint64_t bytes) {
  if (bit_to_flip.load(std::memory_order_acquire) < 0 || bytes < min_message_bytes) return -1;
  return bit_to_flip.exchange(-1);
}

}  // namespace tandem
