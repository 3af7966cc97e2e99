#include "comm/nccl/abort_watch.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

namespace tandem::gpu {
namespace {

constexpr std::chrono::milliseconds kInterval{100};
/// Time of the rank's thread to give up: it knows which communicators are in use.
constexpr std::chrono::seconds kGrace{1};

/// Returns whether `stop` was requested before `time` had passed.
bool stops_within(const std::stop_token& stop, std::chrono::milliseconds time) {
  std::mutex mutex;
  std::condition_variable_any requested;
  std::unique_lock lock(mutex);
  return requested.wait_for(lock, stop, time, [&] { return stop.stop_requested(); });
}

}  // namespace

AbortWatch::AbortWatch(Communicator& control, std::function<void()> end)
    : comm_(control.split(0, control.rank())),
      aborts_(comm_->allocate(0, 1)),
      end_(std::move(end)),
      thread_([this](const std::stop_token& stop) { watch(stop); }) {}

void AbortWatch::watch(const std::stop_token& stop) const {
  while (!stops_within(stop, kInterval)) {
    try {
      comm_->wait(*aborts_, 0, 0, {});
    } catch (const std::exception&) {
      if (!stops_within(stop, kGrace)) end_();
      return;
    }
  }
}

}  // namespace tandem::gpu
