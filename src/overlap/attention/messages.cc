#include "overlap/attention/messages.h"

#include <utility>

namespace tandem {
namespace {
size_t aligned(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}
}  // namespace

ChunkMessage::ChunkMessage(int64_t batch, int64_t max_head, std::vector<Part> parts)
    : batch_(batch), parts_(std::move(parts)) {
  for (const Part& part : parts_) row_bytes_ += size_t(part.columns) * size_of(part.dtype);
  tail_at_ = aligned(chunk_bytes(max_head));
}

size_t ChunkMessage::capacity(int64_t max_tail) const {
  return tail_at_ + aligned(chunk_bytes(max_tail));
}

cpu::ChunkRows ChunkMessage::part(std::byte* base, const schedule::ContextRows& rows,
                                  int index) const {
  const Part& part = parts_[size_t(index)];
  const auto view = [&](std::byte* chunk, int64_t positions) {
    const int64_t count = batch_ * positions;
    for (int i = 0; i < index; ++i) {
      chunk += size_t(count * parts_[size_t(i)].columns) * size_of(parts_[size_t(i)].dtype);
    }
    return Tensor(chunk, part.dtype, {count, part.columns});
  };
  return {view(base, rows.head.count), view(base + tail_at_, rows.tail.count)};
}

}  // namespace tandem
