// Mapping of ranges of a rank's flat array to the full tensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "engine/parallel/buckets.h"

namespace tandem {

/// Elements contiguous both in the flat array and in a full tensor.
struct ParameterPiece {
  size_t parameter = 0;  ///< index in the list
  int64_t whole = 0;     ///< first element in the tensor
  int64_t flat = 0;      ///< first element in the flat array
  int64_t count = 0;
};

/// Local shards of all parameters, sorted by flat offset, so that a lookup does not scan all
/// tensors of a model.
class ParameterPieces {
 public:
  explicit ParameterPieces(std::span<const Parameter> list) {
    for (size_t i = 0; i < list.size(); ++i) {
      Held held{i, list[i].offset, 0, 0, local_part(list[i])};
      LocalPart& part = held.part;
      if (part.rows == 0 || part.columns == 0) continue;
      if (part.columns == part.whole_columns && part.row_stride == part.columns) {
        part.columns *= part.rows;  // contiguous: one row
        part.row_stride = part.columns;
        part.rows = 1;
      }
      held.end = held.begin + (part.rows - 1) * part.row_stride + part.columns;
      held_.push_back(held);
    }
    std::ranges::sort(held_, {}, &Held::begin);
    int64_t reach = std::numeric_limits<int64_t>::min();
    for (Held& held : held_) held.reach = reach = std::max(reach, held.end);
  }

  /// Calls `visit(piece)` for each part of a parameter in `range` of the flat array.
  template <typename Visit>
  void for_each(const FlatRange& range, Visit&& visit) const {
    const int64_t end = range.begin + range.count;
    auto at = std::ranges::upper_bound(held_, range.begin, {}, &Held::reach);
    for (; at != held_.end() && at->begin < end; ++at) {
      if (at->end > range.begin) visit_rows(*at, range.begin, end, visit);
    }
  }

 private:
  struct Held {
    size_t parameter;
    int64_t begin, end;  ///< in the flat array, including gaps between rows
    int64_t reach;       ///< max end of this and all previous ones
    LocalPart part;
  };

  template <typename Visit>
  static void visit_rows(const Held& held, int64_t begin, int64_t end, Visit& visit) {
    const LocalPart& part = held.part;
    const int64_t before = std::max<int64_t>(0, begin - held.begin - part.columns + 1);
    for (int64_t row = (before + part.row_stride - 1) / part.row_stride; row < part.rows; ++row) {
      const int64_t at = held.begin + row * part.row_stride;
      if (at >= end) break;
      const int64_t from = std::max(at, begin), to = std::min(at + part.columns, end);
      visit(ParameterPiece{held.parameter, part.first + row * part.whole_columns + from - at, from,
                           to - from});
    }
  }

  std::vector<Held> held_;
};

}  // namespace tandem
