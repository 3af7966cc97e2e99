#include "engine/model/parameter.h"

#include <algorithm>

namespace tandem {

int64_t FlatWindow::whole(int64_t local) const {
  const auto after = std::ranges::upper_bound(ranges, local, {}, &WindowRange::local);
  return local + (after - 1)->whole - (after - 1)->local;
}

FlatRange FlatWindow::local(FlatRange whole) const {
  const auto position = [&](int64_t element) {
    int64_t local = 0;
    for (const WindowRange& range : ranges) {
      local += std::clamp<int64_t>(element - range.whole, 0, range.count);
    }
    return local;
  };
  const int64_t begin = position(whole.begin);
  return {begin, position(whole.end()) - begin};
}

LocalShard local_shard(const Parameter& p) {
  const Sharding& s = p.sharding;
  if (s.absent) return {0, 0, p.row_stride, 0, p.shape.back()};
  const auto extent = [&](int dim) { return dim == s.tp_dim ? s.count : p.shape[size_t(dim)]; };
  if (p.shape.size() == 1) return {1, extent(0), extent(0), s.over_tp() ? s.begin : 0, p.shape[0]};
  const int64_t first = s.tp_dim == 0 ? s.begin * p.shape[1] : s.tp_dim == 1 ? s.begin : 0;
  return {extent(0), extent(1), p.row_stride, first, p.shape[1]};
}

FlatRange local_range(const Parameter& p) {
  const LocalShard shard = local_shard(p);
  if (shard.rows == 0 || shard.columns == 0) return {p.offset, 0};
  return {p.offset, (shard.rows - 1) * shard.row_stride + shard.columns};
}

}  // namespace tandem
