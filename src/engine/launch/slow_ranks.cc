#include "engine/launch/slow_ranks.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "tandem/error.h"

namespace tandem {
namespace {

constexpr auto kSlowInterval = std::chrono::seconds(2);
constexpr auto kSlowPatience = std::chrono::seconds(1);  ///< for a reading, at the end

}  // namespace

struct SlowRanks::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  bool stops = false, has_ended = false;
  std::vector<report::SlowRank> found;

  void run(const std::string& folder) {
    report::SlowWatch watch(folder);
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, kSlowInterval, [this] { return stops; })) {
      lock.unlock();
      std::vector<report::SlowRank> slow;
      try {
        slow = watch.check();
      } catch (const Error&) {  // the files are read again later
      }
      lock.lock();
      found.insert(found.end(), slow.begin(), slow.end());
    }
    has_ended = true;
    changed.notify_all();
  }
};

SlowRanks::SlowRanks(const std::string& out)
    : shared_(std::make_shared<Shared>()),
      thread_([shared = shared_, folder = out + "/ranks"] { shared->run(folder); }) {}

SlowRanks::~SlowRanks() {
  std::unique_lock lock(shared_->mutex);
  shared_->stops = true;
  shared_->changed.notify_all();
  const bool ends =
      shared_->changed.wait_for(lock, kSlowPatience, [this] { return shared_->has_ended; });
  lock.unlock();
  ends ? thread_.join() : thread_.detach();
}

std::vector<report::SlowRank> SlowRanks::take() {
  const std::lock_guard lock(shared_->mutex);
  return std::exchange(shared_->found, {});
}

}  // namespace tandem
