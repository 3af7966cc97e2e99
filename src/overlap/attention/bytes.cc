#include "overlap/attention/bytes.h"

namespace tandem {
namespace {

constexpr int64_t kF32 = 4;

}  // namespace

int64_t context_bytes(std::string_view form, ContextPass pass, const ContextGrid& grid,
                      int64_t window) {
  const bool forward = pass == ContextPass::forward;
  const auto w = int64_t(size_of(grid.shape.dtype));
  const int64_t q = grid.q_columns(), kv = grid.kv_columns(), heads = grid.shape.heads;
  const int64_t n = grid.world;
  int64_t bytes = 0;
  for (int other = 0; other < grid.world; ++other) {
    if (other == grid.rank) continue;
    // Blocks of the other rank's queries and local keys, and of local queries and its keys.
    const auto of_other = grid.block(other, grid.rank, window),
               of_local = grid.block(grid.rank, other, window);
    if (form == "queries") {
      bytes += of_local.queries.count() * (forward ? w * q : 2 * w * q + 2 * kF32 * heads);
      bytes += of_other.queries.count() * kF32 * (forward ? q + heads : q);
    } else if (form == "heads") {
      const int64_t rows = grid.queries(grid.rank).count(), keys = grid.keys(grid.rank).count();
      const int64_t rows_back = grid.queries(other).count(), keys_back = grid.keys(other).count();
      bytes += rows * (forward ? w * q : 2 * w * q + 2 * kF32 * heads) / n + keys * 2 * w * kv / n;
      bytes += forward ? rows_back * (w * q + kF32 * heads) / n
                       : (rows_back * w * q + keys_back * 2 * w * kv) / n;
    } else {
      bytes += of_other.keys.count() * 2 * w * kv;
      if (!forward) bytes += of_local.keys.count() * 2 * kF32 * kv;
    }
  }
  return grid.shape.batch * bytes;
}

}  // namespace tandem
