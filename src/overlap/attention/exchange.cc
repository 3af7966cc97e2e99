#include "overlap/attention/exchange.h"

namespace tandem {

void ContextExchange::send_head(int peer, const ChunkMessage& message,
                                const schedule::ContextRows& rows, const std::byte* source,
                                size_t offset, int slot) {
  if (rows.head.count == 0) return;
  workspace_.put(peer, offset, source, message.chunk_bytes(rows.head.count), slots_ + slot);
}

void ContextExchange::send_tail(int peer, const ChunkMessage& message,
                                const schedule::ContextRows& rows, const std::byte* source,
                                size_t offset, int slot) {
  // Follows the head's bytes, so its signal stands for both.
  workspace_.put(peer, offset + message.tail_at(), source + message.tail_at(),
                 message.chunk_bytes(rows.tail.count), slot);
}

}  // namespace tandem
