// Row counts of an all-to-all for each pair of ranks.
#pragma once

#include <cstring>
#include <span>
#include <vector>

#include "collectives/call.h"

namespace tandem::collectives {

using Counts = std::span<const int64_t>;

/// Range of each peer's rows, which follow each other, of `row` units each.
template <typename Range, typename Unit>
std::vector<Range> ranges_of(Counts counts, Unit row) {
  std::vector<Range> ranges;
  Unit begin = 0;
  for (const int64_t count : counts) {
    ranges.push_back({begin, Unit(count) * row});
    begin += Unit(count) * row;
  }
  return ranges;
}

/// Throws InvalidArgument unless there is a count for every rank and `tensor` has enough rows for
/// all of them. `what`: "send" or "receive".
void require_counts(const Communicator& comm, const char* what, const Tensor& tensor,
                    Counts counts);

/// Counts of all ranks: r sends sends(r, p) rows to p, and expects receives(r, p) from p.
class CountTable {
 public:
  explicit CountTable(int world) : world_(size_t(world)), table_(2 * world_ * world_) {}
  void set(int rank, const std::byte* both) {
    std::memcpy(&table_[2 * world_ * size_t(rank)], both, bytes());
  }
  size_t bytes() const { return 2 * world_ * sizeof(int64_t); }
  int64_t sends(int from, int to) const { return table_[2 * world_ * size_t(from) + size_t(to)]; }
  int64_t receives(int at, int from) const {
    return table_[2 * world_ * size_t(at) + world_ + size_t(from)];
  }
  /// Throws Mismatch on every rank if one expects another number than is sent.
  void check(Call& call) const;

 private:
  size_t world_;
  std::vector<int64_t> table_;
};

}  // namespace tandem::collectives
