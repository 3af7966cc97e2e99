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
    LocalShape shape = local_shape(p);
    if (shape.rows == 0 || shape.cols == 0) continue;
    const bool is_matrix = p.shape.size() == 2;
    const int64_t columns = is_matrix ? p.shape[1] : shape.cols;  // of the whole tensor
    const int64_t first = p.shard_dim == 0   ? p.begin * (is_matrix ? columns : 1)
                          : p.shard_dim == 1 ? p.begin
                                             : 0;
    if (shape.cols == columns && shape.row_stride == columns) {  // one row, as long as all
      shape = {1, shape.rows * shape.cols, shape.rows * shape.cols};
    }
    const int64_t reach = p.offset + (shape.rows - 1) * shape.row_stride + shape.cols;
    if (p.offset >= end || reach <= range.begin) continue;
    const int64_t before = std::max<int64_t>(0, range.begin - p.offset - shape.cols + 1);
    for (int64_t row = (before + shape.row_stride - 1) / shape.row_stride; row < shape.rows;
         ++row) {
      const int64_t at = p.offset + row * shape.row_stride;
      if (at >= end) break;
      const int64_t from = std::max(at, range.begin), to = std::min(at + shape.cols, end);
      visit(ParameterPiece{i, first + row * columns + from - at, from, to - from});
    }
  }
}

}  // namespace tandem
