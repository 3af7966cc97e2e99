#include "collectives/rows/rows.h"

#include <fmt/format.h>

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
    throw InvalidArgument(fmt::format("{}: {} and {}: expected rows of one shape and dtype", op,
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

void require_shard_position(const char* op, const Communicator& comm, const Tensor& shard,
                            const Operand& whole) {
  if (!byte_range(shard).overlaps(byte_range(*whole.tensor))) return;
  const Shard rows = shard_of(whole.tensor->dim(0), comm.size(), comm.rank());
  const size_t begin = size_t(rows.begin) * row_bytes(*whole.tensor);
  if (shard.as<std::byte>() == whole.tensor->as<std::byte>() + begin) return;
  refuse_overlap(op, {"shard", &shard}, whole,
                 fmt::format("memory of its own, or rank {}'s rows of it, [{}, {})", comm.rank(),
                             rows.begin, rows.begin + rows.count));
}

}  // namespace tandem::collectives
