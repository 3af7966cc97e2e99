#include "collectives/rows/row_messages.h"

#include "codec/whole.h"
#include "core/cpu/parallel.h"

namespace tandem {

RowMessages::RowMessages(const Wire& wire, DType dtype, int64_t columns)
    : wire_(wire),
      dtype_(dtype),
      columns_(columns),
      row_bytes_(size_t(columns) * size_of(dtype)),
      row_(wire.is_exact() ? 0 : wire.bytes(columns, dtype)) {}

size_t RowMessages::bytes(int64_t rows) const {
  if (wire_.is_none()) return 0;
  if (!wire_.is_exact()) return size_t(rows) * row_;
  return (wire_.bytes(rows * columns_, dtype_) + 15) / 16 * 16;
}

size_t RowMessages::max_bytes(int64_t rows, int transfers) const {
  if (!wire_.is_exact() || wire_.is_none()) return bytes(rows);
  // A lossless message is at most 16 bytes longer than its elements, then padded to 16.
  return size_t(rows) * row_bytes_ + size_t(transfers) * 32;
}

size_t RowMessages::encode(const Tensor& values, std::byte* messages) const {
  const int64_t rows = values.dim(0);
  if (rows == 0 || columns_ == 0) return 0;
  if (wire_.is_exact()) {
    return codec::encode_whole(wire_, dtype_, values.data(), rows * columns_, messages);
  }
  cpu::parallel_ranges(rows, cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      codec::encode_whole(wire_, dtype_, values.rows(i, 1).data(), columns_,
                          messages + size_t(i) * row_);
    }
  });
  return size_t(rows) * row_;
}

void RowMessages::decode(const std::byte* messages, int64_t rows, std::byte* values) const {
  if (rows == 0 || columns_ == 0) return;
  if (wire_.is_exact()) {
    return codec::decode_whole(wire_, {messages, bytes(rows)}, dtype_, values, rows * columns_);
  }
  cpu::parallel_ranges(rows, cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      codec::decode_whole(wire_, {messages + size_t(i) * row_, row_}, dtype_,
                          values + size_t(i) * row_bytes_, columns_);
    }
  });
}

}  // namespace tandem
