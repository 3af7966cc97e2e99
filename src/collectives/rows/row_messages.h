// Rows of a matrix in a wire format. A format with groups makes every row a message, so decoded
// values do not depend on how many rows are sent together. An exact (lossless) one encodes all rows
// of a transfer as one message, whose length depends on the values.
#pragma once

#include <algorithm>
#include <cstddef>

#include "schedule/ring.h"
#include "tandem/codec.h"
#include "tandem/tensor.h"

namespace tandem {

using schedule::kMaxChunks;

class RowMessages {
 public:
  /// Messages for rows of `columns` elements. With no wire format (`none`) rows have none.
  RowMessages(const Wire& wire, DType dtype, int64_t columns);

  /// Max bytes of the messages of `rows` rows: a multiple of 16.
  size_t bytes(int64_t rows) const;
  /// Max bytes for at most `rows` rows in up to `transfers` transfers, however they are split.
  size_t max_bytes(int64_t rows, int transfers) const;
  /// Returns the bytes used. `values` has dense rows; for `is_exact` formats it is contiguous.
  size_t encode(const Tensor& values, std::byte* messages) const;
  /// `messages` holds bytes(rows).
  void decode(const std::byte* messages, int64_t rows, std::byte* values) const;

 private:
  Wire wire_;
  DType dtype_;
  int64_t columns_;
  size_t row_bytes_, row_;  // bytes of a row, and of its message
};

/// Sum of bytes(rows_of(i)) for i < end: offset of transfer `end` in a sequence of transfers.
template <typename RowsOf>
size_t bytes_before(const RowMessages& messages, int end, const RowsOf& rows_of) {
  size_t bytes = 0;
  for (int i = 0; i < end; ++i) bytes += messages.bytes(rows_of(i));
  return bytes;
}

/// Max bytes of an owner's rows in up to kMaxChunks transfers, with rows_of(transfers, owner, i)
/// rows each.
template <typename RowsOf>
size_t max_bytes(const RowMessages& messages, int owners, const RowsOf& rows_of) {
  size_t maximum = 0;
  for (int owner = 0; owner < owners; ++owner) {
    for (int transfers = 1; transfers <= kMaxChunks; ++transfers) {
      maximum = std::max(maximum, bytes_before(messages, transfers, [&](int i) {
                           return rows_of(transfers, owner, i);
                         }));
    }
  }
  return maximum;
}

}  // namespace tandem
