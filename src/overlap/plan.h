// How one operator runs: what the tuner chooses between. Every plan of an operator gives the same
// bits (see rows_keep_bits in kernels/gemm.h; sums have one fixed order), so the choice never shows
// in a result.
#pragma once

#include <string>
#include <vector>

#include "tandem/overlap.h"

namespace tandem {

constexpr int kMaxChunks = 16;

struct Plan {
  bool overlapped = false;
  int chunks = 1;         ///< transfers per shard, tapered (GEMM+AR: equal panels)
  bool one_shot = false;  ///< GEMM+AR: every rank sends all and sums all
  bool operator==(const Plan&) const = default;
  Strategy strategy() const { return overlapped ? Strategy::overlapped : Strategy::serial; }
};

/// "overlapped, 4 chunks".
std::string describe(const Plan& plan);

/// Chunk counts worth trying: 1, 2, 3 and 5 while the smallest piece of `rows` keeps 16.
std::vector<int> chunk_counts(int64_t rows);

/// The chunk count when none is asked for and nothing is measured: pieces of at least 32 rows.
int default_chunks(int64_t rows);

/// What the tuner tries, serial first: `chunk_counts`, or just `options.chunks`.
std::vector<Plan> candidates(const OverlapOptions& options, int64_t rows);

/// The plan that a fixed strategy stands for. Throws InvalidArgument for chunks outside
/// [0, kMaxChunks].
Plan fixed_plan(std::string_view op, const OverlapOptions& options, int64_t rows);

}  // namespace tandem
