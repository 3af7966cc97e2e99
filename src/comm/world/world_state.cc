#include "comm/world/world_state.h"

#include <atomic>
#include <exception>
#include <map>
#include <thread>
#include <utility>

namespace tandem {
namespace {

/// Calls `call` for each of them, each on a thread. False if the system has too few threads or too
/// little memory: not for all, then.
template <typename Each, typename Call>
bool on_each(Each& all, const Call& call) {
  try {
    std::vector<std::jthread> others;
    for (size_t i = 1; i < all.size(); ++i) others.emplace_back([&, i] { call(all[i]); });
    call(all.front());
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

std::shared_ptr<WorldState> WorldState::join(const std::string& name,
                                             std::shared_ptr<Communicator> control) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<WorldState>> worlds;
  const std::lock_guard lock(mutex);
  std::erase_if(worlds, [](const auto& world) { return world.second.expired(); });
  auto world = worlds[name].lock();
  if (!world) {
    world = std::make_shared<WorldState>(Communicators{std::move(control)});
    worlds[name] = world;
    return world;
  }
  const std::lock_guard of_world(world->mutex_);
  world->controls_.push_back(std::move(control));
  return world;
}

void WorldState::end_with_all(End end) {
  {
    const std::lock_guard lock(mutex_);
    if (!is_all()) {
      ends_.push_back(std::move(end));
      return;
    }
  }
  end(true);
}

WorldState::~WorldState() {
  if (!ends_.empty()) {
    const bool together = await_all();
    for (const End& end : ends_) end(together);
  }
  release_controls();
}

// The barrier is a call of each rank, so each one needs a thread.
bool WorldState::await_all() const {
  std::atomic<bool> together = true;
  const bool all_called = on_each(controls_, [&](const auto& control) {
    try {
      control->barrier("the end of its world");
    } catch (const std::exception&) {
      together = false;
    }
  });
  return all_called && together;
}

void WorldState::release_controls() {
  on_each(controls_, [](auto& control) { control.reset(); });
}

}  // namespace tandem
