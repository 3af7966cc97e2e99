#include "engine/checkpoint/run/run_checkpoints.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "comm/world/host_ranks.h"
#include "core/system/files.h"
#include "engine/checkpoint/saving.h"
#include "engine/config/device_traits.h"
#include "engine/parallel/collective_check.h"
#include "gemm/gemm.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

/// Adds the time of its scope.
class Blocked {
 public:
  explicit Blocked(double& ms) : ms_(ms) {}
  ~Blocked() { ms_ += std::chrono::duration<double, std::milli>(Clock::now() - begin_).count(); }
  Blocked(const Blocked&) = delete;
  Blocked& operator=(const Blocked&) = delete;

 private:
  double& ms_;
  Clock::time_point begin_ = Clock::now();
};

}  // namespace

RunCheckpoints::RunCheckpoints(const TrainedRanks& ranks, Options options, const TrainState& state)
    : ranks_(ranks), options_(std::move(options)), due_s_(state.elapsed_s) {
  if (ranks.world.rank() == 0) {
    keeper_.emplace(options_.out, options_.keep, [this](const std::string& text) { warn(text); });
  }
  if (!options_.schedule.is_periodic()) return;
  on_every_rank(ranks.world, "memory of snapshots", 0, [&] {
    snapshot_.emplace(ranks, state, options_.memory->local(), options_.memory->owner(),
                      options_.schedule.generations());
    return std::string();
  });
  background_ = split_on_host(ranks.world);
  if (options_.memory->restored() >= 0) newest_ = options_.memory->restored();
  if (!options_.peers) return;
  copies_.emplace(*options_.peers, *options_.memory);
  if (options_.memory->restored() < 0) return;
  // Until the first copies of this start are complete, a lost rank needs those of the one before.
  const std::optional<int> copied = options_.memory->copied();
  copied_ = copied.value_or(-1);
  is_copied_elsewhere_ = copied == -1;
  copy_to_peer();
}

RunCheckpoints::~RunCheckpoints() {
  if (!write_.valid()) return;
  const bool failed = std::uncaught_exceptions() > 0;
  const auto state = write_.wait_for(std::chrono::seconds(failed ? 10 : 0));
  // It may wait for a rank that waits for this one's error.
  if (failed && state == std::future_status::timeout) background_->abort("the run has ended");
  write_.wait();
}

bool RunCheckpoints::is_checkpoint_due(const TrainState& state) const {
  const CheckpointSchedule& s = options_.schedule;
  return (s.every > 0 && state.step % s.every == 0) ||
         (s.every_s > 0 && state.elapsed_s - due_s_ >= s.every_s) ||
         (s.first_step && state.step == 1) || is_owed_;
}

bool RunCheckpoints::is_due(const TrainState& state) const {
  const int64_t every = options_.schedule.snapshot_every;
  return is_checkpoint_due(state) || (every > 0 && state.step % every == 0);
}

RunCheckpoints::Running RunCheckpoints::running() {
  if (options_.schedule.snapshot_every > 0) {
    const Blocked blocked(blocked_ms_);
    // Other ranks replace older ones next.
    snapshot_->generation(newest_).await_complete_checked();
  }
  return {write_.valid() && write_.wait_for(std::chrono::seconds(0)) == std::future_status::timeout,
          copies_ && copies_->is_running()};
}

/// Generation to take the next snapshot in: the same choice by step on every rank. -1 if there is
/// none.
int RunCheckpoints::free_generation() const {
  std::vector<int> in_use;
  for (const int index : {newest_, written_, copying_, copied_}) {
    if (index >= 0 && std::ranges::find(in_use, index) == in_use.end()) in_use.push_back(index);
  }
  if (copies_) {
    const size_t count = in_use.size() + (copied_ < 0 && is_copied_elsewhere_);
    const bool is_free = count < size_t(options_.schedule.generations());
    return is_free ? options_.memory->local().oldest(in_use) : -1;
  }
  const int found = options_.memory->local().oldest(in_use);
  if (found >= 0) return found;
  return newest_ == written_ ? -1 : newest_;  // it is replaced
}

/// Returns whether it was taken.
bool RunCheckpoints::take_snapshot(const TrainState& state) {
  const Blocked blocked(blocked_ms_);
  const int free = free_generation();
  if (free < 0) return false;
  newest_ = free;
  newest_step_ = state.step;
  newest_sample_ = state.next_sample;
  snapshot_->generation(newest_).take(ranks_, state, options_.memory->start());
  return true;
}

void RunCheckpoints::copy_to_peer() {
  copying_ = newest_;
  copies_->begin(snapshot_->generation(newest_), newest_);
}

void RunCheckpoints::before_update() const {
  if (!snapshot_) return;
  for (int index = 0; index < options_.schedule.generations(); ++index) {
    snapshot_->generation(index).before_update(ranks_);
  }
}

/// Threads that hash what is written: on GPUs training leaves processors idle.
int RunCheckpoints::num_threads() const {
  constexpr int kMaxThreads = 4;
  const bool is_host = device_traits(ranks_.stages.front().model.exec()).is_host;
  return is_host ? 1 : std::min(kMaxThreads, kernel_threads());
}

size_t RunCheckpoints::memory_bytes() const {
  return options_.memory->local().bytes() + options_.memory->peer().bytes();
}

void RunCheckpoints::after_step(const TrainState& state, bool requested, Running running) {
  if (!running.writes && write_.valid()) {
    written_ = -1;
    collect(write_.get());
  }
  if (!running.copies && copying_ >= 0) {
    copies_->end();
    copied_ = std::exchange(copying_, -1);
  }
  const bool is_written = is_checkpoint_due(state) || requested;
  if (is_written || is_due(state)) {
    if (is_written) due_s_ = state.elapsed_s;
    if (!snapshot_) {
      const Blocked blocked(blocked_ms_);
      return collect(save_live(state));
    }
    is_owed_ = !take_snapshot(state) && is_written;
    is_pending_ = is_pending_ || (is_written && !is_owed_);
  }
  if (copies_ && copying_ < 0 && newest_ != copied_ && newest_step_ >= 0) copy_to_peer();
  if (running.writes || !is_pending_) return;
  is_pending_ = false;
  written_ = newest_;
  write_ = std::async(
      std::launch::async | std::launch::deferred,
      [this, training = std::this_thread::get_id(), &from = snapshot_->generation(newest_),
       step = newest_step_, next_sample = newest_sample_, count = num_threads()] {
        std::optional<KernelThreads> threads;
        if (std::this_thread::get_id() != training) {
          ::setpriority(PRIO_PROCESS, 0, 10);  // training has the processors first
          threads.emplace(count);
        }
        return write(from, step, next_sample);
      });
  // If no thread could be started, this one writes, as the other ranks' do.
  if (write_.wait_for(std::chrono::seconds(0)) == std::future_status::deferred) write_.wait();
}

RunCheckpoints::Outcome RunCheckpoints::write(const SnapshotGeneration& generation, int64_t step,
                                              int64_t next_sample) {
  Outcome outcome{step, next_sample, ""};
  const DiskDeadline longer(*background_);
  try {
    TrainState state;
    on_every_rank(*background_, "reading a snapshot", ranks_.bytes(), [&] {
      state = generation.verify();
      return std::string();
    });
    save(*background_, generation, state);
  } catch (const IoError& error) {
    outcome.error = error.what();
  }
  return outcome;
}

void RunCheckpoints::save(Communicator& world, const OwnedState& owned, const TrainState& state) {
  on_rank_zero(world, "the folder of the run", [&] {
    options_.prepare();
    return std::string();
  });
  const TrainedRanks ranks{world,          ranks_.layout,   ranks_.tp,   ranks_.stages,
                           ranks_.learner, ranks_.learners, ranks_.outer};
  const std::string problem = save_checkpoint(ranks, owned, options_.out, state, options_.model,
                                              keeper_ ? &*keeper_ : nullptr);
  if (!problem.empty()) throw IoError(problem);
}

RunCheckpoints::Outcome RunCheckpoints::save_live(const TrainState& state) {
  Outcome outcome{state.step, state.next_sample, ""};
  try {
    save(ranks_.world, LiveState(ranks_), state);
  } catch (const IoError& error) {
    outcome.error = error.what();
  }
  return outcome;
}

void RunCheckpoints::collect(const Outcome& outcome) {
  if (outcome.error.empty()) {
    saved_step_ = outcome.step;
    saved_sample_ = outcome.next_sample;
    if (std::exchange(is_failing_, false)) {
      warn(fmt::format("checkpoints are saved again: {}",
                       checkpoint_path(options_.out, outcome.step)));
    }
  } else if (!std::exchange(is_failing_, true)) {
    warn(fmt::format("checkpoint of step {} not saved, tried again with the next one: {}",
                     outcome.step, outcome.error));
  }
}

std::string RunCheckpoints::save_now(const TrainState& state) {
  await_newest();
  if (write_.valid()) {
    written_ = -1;
    collect(write_.get());
  }
  // A dropped step after the checkpoint has consumed samples.
  if (saved_step_ == state.step && saved_sample_ == state.next_sample) return "";
  Outcome outcome = save_live(state);
  if (outcome.error.empty()) collect(outcome);
  return outcome.error;
}

/// Before other threads are waited for that wait for the snapshot and do not check its stream.
void RunCheckpoints::await_newest() const {
  if (snapshot_) snapshot_->generation(newest_).await_complete_checked();
}

std::string RunCheckpoints::set_aside(int64_t step) {
  await_newest();
  if (write_.valid()) {
    written_ = -1;
    collect(write_.get());
  }
  if (std::exchange(copying_, -1) >= 0) copies_->end();
  options_.memory->erase(step);
  return on_rank_zero(ranks_.world, "setting a checkpoint aside", [&] {
    const std::string path = checkpoint_path(options_.out, step);
    if (path_exists(path)) {
      warn(fmt::format("{} is now called {}", path, tandem::set_aside(path, "corrupt")));
    }
    const std::vector<std::string> left = list_checkpoints(options_.out);
    return left.empty() ? "there is no checkpoint of an earlier step"
                        : "resume from " + left.front();
  });
}

double RunCheckpoints::take_blocked_ms() {
  return std::exchange(blocked_ms_, 0);
}

void RunCheckpoints::warn(const std::string& text) {
  const std::lock_guard lock(mutex_);
  warnings_.push_back(text);
}

std::vector<std::string> RunCheckpoints::take_warnings() {
  const std::lock_guard lock(mutex_);
  return std::exchange(warnings_, {});
}

}  // namespace tandem
