#include "comm/message_fault.h"

#include <atomic>

namespace tandem {
namespace {

struct Flip {
  std::atomic<int64_t> bit{-1};
  std::atomic<uint64_t> min_bytes{1};

  void ask(uint32_t of_bit, uint64_t of_bytes) {
    min_bytes = of_bytes;
    bit = of_bit;
  }
  int64_t take(uint64_t bytes) {
    if (bit.load(std::memory_order_acquire) < 0 || bytes < min_bytes) return -1;
    return bit.exchange(-1);
  }
};
Flip contents, header;

}  // namespace

void flip_bit_of_next_message(uint32_t bit, uint64_t min_bytes, bool in_header) {
  (in_header ? header : contents).ask(bit, min_bytes);
}

int64_t take_bit_to_flip(uint64_t bytes) {
  return contents.take(bytes);
}

int64_t take_header_bit(uint64_t bytes) {
  return header.take(bytes);
}

}  // namespace tandem
