// This process's rank of a World made of the members of a caller's group, which gather bytes from
// each other.
#include <fmt/format.h>

#include <limits>
#include <string>

#include "comm/device/gpu_coordinates.h"
#include "comm/processes/connect_ranks.h"
#include "comm/world/new_worlds.h"
#include "core/system/env.h"

namespace tandem {
namespace {

std::string refusal_of(int rank, int size, const WorldOptions& options) {
  if (rank < 0 || rank >= size) return fmt::format("rank {} of {}: out of range", rank, size);
  if (options.ranks != 1 && options.ranks != size) {
    return fmt::format("ranks {}: the group has {}: expected {} or none given", options.ranks, size,
                       size);
  }
  if (options.link) {
    return fmt::format("link '{}': expected none: only ranks that are threads emulate one",
                       options.link->describe());
  }
  if (options.ranks_per_gpu != 1) {
    return fmt::format("{} ranks a GPU: expected 1 for CPU ranks", options.ranks_per_gpu);
  }
  return {};
}

}  // namespace

Communicators connect_process_rank(int rank, int size, const World::Gather& gather,
                                   const WorldOptions& options) {
  const processes::Newcomer local{rank, size, this_node(), refusal_of(rank, size, options)};
  return {processes::connect_ranks("connect", local, gather, std::numeric_limits<int>::max(),
                                   world_deadline(options.deadline_s))
              .comm};
}

}  // namespace tandem
