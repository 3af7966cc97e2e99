#include "engine/model/parameter.h"

namespace tandem {

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
