#include "comm/world/same_build.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "core/system/env.h"
#include "core/system/process/build_id.h"
#include "tandem/error.h"

namespace tandem {

Build this_build() {
  Build build{};
  build_text().copy(build.text, sizeof build.text - 1);
  build.allowed = env().allow_mixed_builds ? 1 : 0;
  return build;
}

void require_same_build(std::span<const Build> ranks) {
  if (std::ranges::all_of(ranks, [](const Build& b) { return b.allowed == 1; })) return;
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    const std::string_view first = ranks[0].text, other = ranks[rank].text;
    if (first == other) continue;
    throw Mismatch(
        fmt::format("rank 0 runs {}; rank {} runs {}: expected the same program on all ranks "
                    "(TANDEM_ALLOW_MIXED_BUILDS=1 on all of them allows others)",
                    first, rank, other));
  }
}

}  // namespace tandem
