// Where a stretch of a rank's flat array stands in the whole tensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "train/buckets.h"

namespace tandem {

/// Elements side by side in the flat array and in a whole tensor.
struct ParameterPiece {
  size_t parameter = 0;  ///< of the list
  int64_t whole = 0;     ///< its first element in the tensor
  int64_t flat = 0;      ///< and in the flat array
  int64_t count = 0;
};

/// Calls `visit(piece)` for what of each parameter of `list` stands in `range` of the flat array.
template <typename Visit>
void for_each_piece(std::span<const Parameter> list, const Buckets::Range& range, Visit&& visit) {
  const int64_t end = range.begin + range.count;
  for (size_t i = 0; i < list.size(); ++i) {
    const Parameter& p = list[i];
    LocalPart part = local_part(p);
    if (part.rows == 0 || part.columns == 0) continue;
    if (part.columns == part.whole_columns && part.row_stride == part.columns) {
      part.columns *= part.rows;  // side by side: one row
      part.row_stride = part.columns;
      part.rows = 1;
    }
    const int64_t reach = p.offset + (part.rows - 1) * part.row_stride + part.columns;
    if (p.offset >= end || reach <= range.begin) continue;
    const int64_t before = std::max<int64_t>(0, range.begin - p.offset - part.columns + 1);
    for (int64_t row = (before + part.row_stride - 1) / part.row_stride; row < part.rows; ++row) {
      const int64_t at = p.offset + row * part.row_stride;
      if (at >= end) break;
      const int64_t from = std::max(at, range.begin), to = std::min(at + part.columns, end);
      visit(ParameterPiece{i, part.first + row * part.whole_columns + from - at, from, to - from});
    }
  }
}

}  // namespace tandem
