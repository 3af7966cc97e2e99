#include "comm/threads/new_group.h"

#include <fmt/format.h>

#include <numeric>
#include <vector>

#include "comm/threads/threads_communicator.h"
#include "comm/workspace.h"
#include "comm/world/new_worlds.h"
#include "core/system/env.h"
#include "core/system/machine.h"

namespace tandem {
namespace threads {
namespace {

/// Throws InvalidArgument if the envelopes exceed the machine's memory: every rank has one for
/// every other, which is too much for thousands of ranks.
void check_memory(int ranks) {
  const double bytes =
      double(ranks) * 2 * ranks * double(WorkspaceLayout::of(ranks).envelope_bytes);
  if (bytes < 1e9) return;
  const auto machine = double(this_machine().memory_bytes);
  if (machine > 0 && bytes > machine) {
    throw InvalidArgument(
        fmt::format("ranks {}: what they send each other first needs {:.3g} GB: expected at most "
                    "this machine's {:.3g} GB",
                    ranks, bytes / 1e9, machine / 1e9));
  }
}

/// Ends the links with the last communicator, whichever rank owns that.
struct OpenWorld {
  std::shared_ptr<SharedWorld> world;
  explicit OpenWorld(std::shared_ptr<SharedWorld> world_) : world(std::move(world_)) {}
  ~OpenWorld() { world->close(); }
};

}  // namespace

std::shared_ptr<Group> new_group(const WorldOptions& options) {
  if (options.ranks < 1) {
    throw InvalidArgument(fmt::format("ranks {}: expected at least 1", options.ranks));
  }
  if (options.link) options.link->check();
  check_memory(options.ranks);
  std::vector<int> ranks(size_t(options.ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_shared<Group>(std::make_shared<SharedWorld>(options), std::move(ranks));
}

}  // namespace threads

Communicators new_thread_ranks(const WorldOptions& options) {
  const double deadline_s = world_deadline(options.deadline_s);
  const auto group = threads::new_group(options);
  const auto open = std::make_shared<threads::OpenWorld>(group->world);
  Communicators all;
  for (int rank = 0; rank < options.ranks; ++rank) {
    auto comm = std::make_unique<threads::ThreadsCommunicator>(group, rank, deadline_s);
    all.emplace_back(comm.release(), [open](Communicator* gone) { delete gone; });
  }
  return all;
}

}  // namespace tandem
