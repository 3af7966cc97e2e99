#include "engine/infer/decoder_parts.h"

#include <algorithm>

namespace tandem {

int64_t widest_in(const ModelLayout& layout) {
  int64_t most = 0;
  for (const BranchLayout& b : layout.branches) most = std::max(most, b.in.rows);
  return most;
}

int64_t widest_inner(const ModelLayout& layout) {
  int64_t most = 0;
  for (const BranchLayout& b : layout.branches) most = std::max(most, b.out.columns);
  return most;
}

}  // namespace tandem
