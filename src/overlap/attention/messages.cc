#include "overlap/attention/messages.h"

#include <utility>

#include "core/cpu/parallel.h"

namespace tandem {
namespace {
size_t aligned(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}
}  // namespace

ChunkMessage::ChunkMessage(int64_t batch, int64_t max_head, std::vector<Field> fields,
                           const Wire& wire)
    : batch_(batch), fields_(std::move(fields)), wire_(wire), tail_at_(0) {
  tail_at_ = aligned(chunk_bytes(max_head));
}

size_t ChunkMessage::chunk_bytes(int64_t positions) const {
  size_t bytes = 0;
  for (const Field& field : fields_) {
    bytes += wire_.bytes(batch_ * positions * field.columns, field.dtype);
  }
  return bytes;
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

template <typename Body>
void ChunkMessage::each_field(const ChunkMessage& uncompressed, std::byte* base,
                              const schedule::ContextRows& rows, const Body& body) const {
  const auto count = int64_t(fields_.size());
  cpu::parallel_ranges(2 * count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const bool is_tail = i >= count;
      size_t offset = is_tail ? tail_at_ : 0;
      for (int64_t before = is_tail ? count : 0; before < i; ++before) {
        const Field& field = fields_[size_t(before % count)];
        offset += wire_.bytes(batch_ * (is_tail ? rows.tail : rows.head).count * field.columns,
                              field.dtype);
      }
      const cpu::ChunkRows field = uncompressed.field(base, rows, int(i % count));
      const Tensor& tensor = is_tail ? field.tail : field.head;
      if (tensor.elements() > 0) body(tensor, offset);
    }
  });
}

void ChunkMessage::encode(const ChunkMessage& uncompressed, std::byte* from,
                          const schedule::ContextRows& rows, std::byte* to) const {
  each_field(uncompressed, from, rows, [&](const Tensor& tensor, size_t offset) {
    tandem::encode(wire_, tensor, {to + offset, wire_.bytes(tensor.elements(), tensor.dtype())});
  });
}

void ChunkMessage::decode(const ChunkMessage& uncompressed, const std::byte* from,
                          const schedule::ContextRows& rows, std::byte* to) const {
  each_field(uncompressed, to, rows, [&](const Tensor& tensor, size_t offset) {
    tandem::decode(wire_, {from + offset, wire_.bytes(tensor.elements(), tensor.dtype())}, tensor);
  });
}

}  // namespace tandem
