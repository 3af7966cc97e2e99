#include "collectives/rows/counts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tandem::collectives {

void require_counts(const Communicator& comm, const char* what, const Tensor& tensor,
                    Counts counts) {
  int64_t total = 0;
  bool fits = counts.size() == size_t(comm.size());
  for (const int64_t count : counts) {
    if (count < 0) {
      throw InvalidArgument(
          fmt::format("all_to_all: {} count {}: expected at least 0", what, count));
    }
    fits = fits && count <= tensor.dim(0) - total;
    total += fits ? count : 0;
  }
  if (!fits) {
    throw InvalidArgument(
        fmt::format("all_to_all: {} {} counts, {}, for {}: expected {} counts that fit", what,
                    counts.size(), fmt::join(counts, " + "), tensor.describe(), comm.size()));
  }
}

void CountTable::check(Call& call) const {
  for (int from = 0; from < int(world_); ++from) {
    for (int to = 0; to < int(world_); ++to) {
      if (sends(from, to) == receives(to, from)) continue;
      call.refuse(fmt::format("all_to_all: rank {} sends {} rows to rank {}, which expects {}",
                              from, sends(from, to), to, receives(to, from)));
    }
  }
}

}  // namespace tandem::collectives
