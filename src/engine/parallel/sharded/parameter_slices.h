// Mapping of ranges of a rank's flat array to the full tensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "engine/parallel/sharded/buckets.h"

namespace tandem {

/// Elements contiguous both in the flat array and in a full tensor.
struct ParameterSlice {
  size_t parameter = 0;  ///< index in the list
  int64_t whole = 0;     ///< first element in the tensor
  int64_t flat = 0;      ///< first element in the flat array
  int64_t count = 0;
};

/// Local shards of all parameters, sorted by flat offset, so that a lookup does not scan all
/// tensors of a model.
class ParameterSlices {
 public:
  explicit ParameterSlices(std::span<const Parameter> list) {
    for (size_t i = 0; i < list.size(); ++i) {
      Entry entry{i, list[i].offset, 0, 0, local_shard(list[i])};
      LocalShard& shard = entry.shard;
      if (shard.rows == 0 || shard.columns == 0) continue;
      if (shard.columns == shard.whole_columns && shard.row_stride == shard.columns) {
        shard.columns *= shard.rows;  // contiguous: one row
        shard.row_stride = shard.columns;
        shard.rows = 1;
      }
      entry.end = entry.begin + (shard.rows - 1) * shard.row_stride + shard.columns;
      entries_.push_back(entry);
    }
    std::ranges::sort(entries_, {}, &Entry::begin);
    int64_t reach = std::numeric_limits<int64_t>::min();
    for (Entry& entry : entries_) entry.reach = reach = std::max(reach, entry.end);
  }

  /// Calls `visit(slice)` for each slice of a parameter in `range` of the flat array.
  template <typename Visit>
  void for_each(const FlatRange& range, Visit&& visit) const {
    const int64_t end = range.begin + range.count;
    auto at = std::ranges::upper_bound(entries_, range.begin, {}, &Entry::reach);
    for (; at != entries_.end() && at->begin < end; ++at) {
      if (at->end > range.begin) visit_rows(*at, range.begin, end, visit);
    }
  }

 private:
  struct Entry {
    size_t parameter;
    int64_t begin, end;  ///< in the flat array, including gaps between rows
    int64_t reach;       ///< max end of this and all previous ones
    LocalShard shard;
  };

  template <typename Visit>
  static void visit_rows(const Entry& entry, int64_t begin, int64_t end, Visit& visit) {
    const LocalShard& shard = entry.shard;
    const int64_t before = std::max<int64_t>(0, begin - entry.begin - shard.columns + 1);
    for (int64_t row = (before + shard.row_stride - 1) / shard.row_stride; row < shard.rows;
         ++row) {
      const int64_t at = entry.begin + row * shard.row_stride;
      if (at >= end) break;
      const int64_t from = std::max(at, begin), to = std::min(at + shard.columns, end);
      visit(ParameterSlice{entry.parameter, shard.first + row * shard.whole_columns + from - at,
                           from, to - from});
    }
  }

  std::vector<Entry> entries_;
};

}  // namespace tandem
