#include "cli/slow_ranks.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "tandem/error.h"

namespace tandem::cli {
namespace {

constexpr auto kSlowInterval = std::chrono::seconds(2);
constexpr auto kSlowPatience = std::chrono::seconds(1);  ///< for a reading, at the end

std::string training_output(const std::vector<std::string>& command) {
  std::string out;
  for (size_t i = 0; i < command.size(); ++i) {
    if (command[i] == "--out" && i + 1 < command.size()) out = command[i + 1];
    if (command[i].starts_with("--out=")) out = command[i].substr(6);
  }
  return out;
}

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

SlowRanks::SlowRanks(const std::vector<std::string>& command)
    : shared_(std::make_shared<Shared>()),
      thread_([shared = shared_, folder = training_output(command) + "/ranks"] {
        shared->run(folder);
      }) {}

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

}  // namespace tandem::cli
