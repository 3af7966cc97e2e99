#include "overlap/attention/messages.h"

#include <utility>

namespace tandem {
namespace {
size_t aligned(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}
}  // namespace

ChunkMessage::ChunkMessage(int64_t batch, int64_t max_head, std::vector<Field> fields)
    : batch_(batch), fields_(std::move(fields)) {
  for (const Field& field : fields_) row_bytes_ += size_t(field.columns) * size_of(field.dtype);
  tail_at_ = aligned(chunk_bytes(max_head));
}

size_t ChunkMessage::capacity(int64_t max_tail) const {
  return tail_at_ + aligned(chunk_bytes(max_tail));
}

cpu::ChunkRows ChunkMessage::field(std::byte* base, const schedule::ContextRows& rows,
                                   int index) const {
  const Field& field = fields_[size_t(index)];
  const auto view = [&](std::byte* chunk, int64_t positions) {
    const int64_t count = batch_ * positions;
    for (int i = 0; i < index; ++i) {
      chunk += size_t(count * fields_[size_t(i)].columns) * size_of(fields_[size_t(i)].dtype);
    }
    return Tensor(chunk, field.dtype, {count, field.columns});
  };
  return {view(base, rows.head.count), view(base + tail_at_, rows.tail.count)};
}

}  // namespace tandem
