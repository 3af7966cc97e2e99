#include "collectives/rows.h"

#include <fmt/format.h>

#include <cstdint>

#include "tandem/collectives.h"

namespace tandem::collectives {

size_t row_bytes(const Tensor& tensor) {
  size_t bytes = size_of(tensor.dtype());
  for (int i = 1; i < tensor.dims(); ++i) bytes *= size_t(tensor.dim(i));
  return bytes;
}

void require_same_rows(const char* op, const Tensor& a, const Tensor& b) {
  bool same = a.dtype() == b.dtype() && a.dims() == b.dims() && a.dims() >= 1;
  for (int i = 1; same && i < a.dims(); ++i) same = a.dim(i) == b.dim(i);
  if (!same) {
    throw InvalidArgument(fmt::format("{}: {} beside {}: expected rows of one shape and dtype", op,
                                      a.describe(), b.describe()));
  }
}

void require_shard(const char* op, const Communicator& comm, const Tensor& shard,
                   const Tensor& whole) {
  require_same_rows(op, shard, whole);
  const int64_t rows = shard_of(whole.dim(0), comm.size(), comm.rank()).count;
  if (shard.dim(0) != rows) {
    throw InvalidArgument(fmt::format("{}: shard {} of {}: rank {} of {} holds {} rows", op,
                                      shard.describe(), whole.describe(), comm.rank(), comm.size(),
                                      rows));
  }
}

void require_place(const char* op, const Communicator& comm, const Tensor& shard,
                   const Tensor& whole) {
  const auto from = reinterpret_cast<uintptr_t>(whole.data());
  const auto at = reinterpret_cast<uintptr_t>(shard.data());
  const Shard rows = shard_of(whole.dim(0), comm.size(), comm.rank());
  const bool apart = at >= from + whole.bytes() || from >= at + shard.bytes();
  if (apart || at == from + size_t(rows.begin) * row_bytes(whole)) return;
  throw InvalidArgument(
      fmt::format("{}: shard {} begins {} bytes from {}, which it overlaps: expected memory of its "
                  "own, or rank {}'s rows of it, [{}, {})",
                  op, shard.describe(), int64_t(at - from), whole.describe(), comm.rank(),
                  rows.begin, rows.begin + rows.count));
}

}  // namespace tandem::collectives
