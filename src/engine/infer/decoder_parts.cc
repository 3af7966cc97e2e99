#include "engine/infer/decoder_parts.h"

#include <algorithm>

namespace tandem {

int64_t widest_in(const ModelLayout& layout) {
  int64_t maximum = 0;
  for (const BranchLayout& b : layout.branches) maximum = std::max(maximum, b.in.rows);
  return maximum;
}

int64_t widest_inner(const ModelLayout& layout) {
  int64_t maximum = 0;
  for (const BranchLayout& b : layout.branches) maximum = std::max(maximum, b.out.columns);
  return maximum;
}

}  // namespace tandem
