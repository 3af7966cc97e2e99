#include "comm/threads/world.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "comm/agreement.h"
#include "core/host_memory.h"
#include "core/out_of_memory.h"

namespace tandem::threads {

SharedWorld::SharedWorld(const WorldOptions& options)
    : link(options.link),
      spins(options.ranks <= int(std::thread::hardware_concurrency()) ? 200 : 0) {
  for (int rank = 0; link && rank < options.ranks; ++rank) {
    links_.push_back(std::make_unique<Link>(*link));
  }
}

void SharedWorld::abort(int origin, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (aborted_.load(std::memory_order_relaxed)) return;
  origin_ = origin;
  reason_ = reason;
  aborted_.store(true);
  for (Group* group : groups_) {
    for (FutexWaiter& waiter : group->waiters) waiter.ring();
  }
}

void SharedWorld::throw_aborted() const {
  const std::lock_guard lock(mutex_);
  throw Aborted(origin_, reason_);
}

void SharedWorld::add(Group* group) {
  const std::lock_guard lock(mutex_);
  groups_.push_back(group);
}

void SharedWorld::remove(Group* group) {
  const std::lock_guard lock(mutex_);
  std::erase(groups_, group);
}

Segments::Segments(int ranks, size_t bytes, int signals) : segments_(size_t(ranks)) {
  for (RankSegment& segment : segments_) {
    segment.memory = allocate_zeroed(bytes);  // large memory is first touched by its rank
    if (!segment.memory) {
      throw AgreedError(
          fmt::format("symmetric memory of {} bytes: the system has none left", bytes));
    }
    segment.signals = std::make_unique<PaddedSignal[]>(size_t(signals));
  }
}

Group::Group(std::shared_ptr<SharedWorld> world_, std::vector<int> world_ranks_)
    : world(std::move(world_)), world_ranks(std::move(world_ranks_)), waiters(world_ranks.size()) {
  world->add(this);
}

Group::~Group() {
  world->remove(this);
}

std::shared_ptr<void> Group::obtain(const std::string& name, int takers,
                                    const std::function<std::shared_ptr<void>()>& make) {
  const std::lock_guard lock(mutex_);
  const auto [entry, first] = made_.try_emplace(name, Made{nullptr, nullptr, takers});
  if (first) {
    try {
      entry->second.value = make();
    } catch (...) {
      entry->second.failure = std::current_exception();
    }
  }
  const Made made = entry->second;
  if (--entry->second.left == 0) made_.erase(entry);
  if (made.failure) std::rethrow_exception(made.failure);
  return made.value;
}

}  // namespace tandem::threads
