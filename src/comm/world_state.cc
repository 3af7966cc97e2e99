#include "comm/world_state.h"

#include <atomic>
#include <exception>
#include <map>
#include <thread>
#include <utility>

namespace tandem {

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
  if (ends_.empty()) return;
  const bool together = await_all();
  for (const End& end : ends_) end(together);
}

// The barrier is a call of each rank, so each one needs a thread.
bool WorldState::await_all() const {
  std::atomic<bool> together = true;
  const auto come = [&](Communicator& control) {
    try {
      control.barrier("the end of its world");
    } catch (const std::exception&) {
      together = false;
    }
  };
  try {
    std::vector<std::jthread> others;
    for (size_t i = 1; i < controls_.size(); ++i) {
      others.emplace_back([&, i] { come(*controls_[i]); });
    }
    come(*controls_.front());
  } catch (const std::exception&) {  // out of threads or memory
    together = false;
  }
  return together;
}

}  // namespace tandem
