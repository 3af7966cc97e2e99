// Forms of runs of attention over pages on a GPU, and checks of their results.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/gpu/kernel_operands.h"
#include "tests/kernels/paged_reference.h"

namespace tandem::test {

inline std::string describe(const PagedCase& c, const PagedRuns& runs) {
  return fmt::format(
      "{} head_dim {} heads {}/{} window {} batch_invariant {}, {} sequences, chunks {}, {} rows, "
      "cluster {}, appends {}",
      name_of(c.dtype()), c.shape.head_dim, c.shape.heads, c.shape.kv_heads, c.window,
      runs.batch_invariant, c.lengths.size(), runs.as_chunks, runs.max_rows, runs.cluster,
      runs.appends);
}

constexpr PagedRuns kChunked{1 << 20, true, true};

/// Runs of which single rows of sequences of their own may be appended by the kernel that attends.
inline PagedRuns appending(PagedRuns runs) {
  runs.appends = true;
  return runs;
}
/// Runs with a cluster of so many blocks for each row and key head.
inline PagedRuns in_clusters(PagedRuns runs, int blocks) {
  runs.cluster = blocks;
  return runs;
}

/// Expects results within their bounds, twice the distance of which no mistake is within, with sums
/// in either order.
inline void expect_right(const Exec& exec, const PagedCase& c, const std::vector<PagedRuns>& all) {
  const PagedReference reference(c);
  EXPECT_GT(reference.nearest_mistake(), 2) << "one wrong key would pass: " << describe(c, all[0]);
  for (const PagedRuns& runs : all) {
    for (const PagedRuns& either : {runs, in_any_order(runs)}) {
      EXPECT_LE(reference.error_of(run_paged(exec, c, either)), 1) << describe(c, either);
    }
  }
}

}  // namespace tandem::test
