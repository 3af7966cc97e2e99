#include "core/replay.h"

#include <algorithm>

#include "core/device_memory.h"

namespace tandem {

Replay::Replay() = default;
Replay::~Replay() = default;

void Replay::run(const Exec& exec, const Key& key, const std::function<void()>& enqueue) {
  if (!can_capture(exec)) return enqueue();
  const auto [at, is_new] = entries_.try_emplace(key);
  Entry& entry = at->second;
  entry.used = ++uses_;
  if (is_new) {
    if (entries_.size() > kMaxGraphs) drop_oldest();
    return enqueue();
  }
  if (!entry.work) entry.work = capture(exec, enqueue);
  entry.work->launch(exec);
}

void Replay::drop_oldest() {
  entries_.erase(
      std::ranges::min_element(entries_, {}, [](const auto& entry) { return entry.second.used; }));
}

}  // namespace tandem
