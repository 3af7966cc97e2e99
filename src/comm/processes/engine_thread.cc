// Communication thread of Engine.

#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>

#include "comm/processes/engine.h"
#include "core/system/env.h"
#include "core/system/log.h"

namespace tandem::processes {
namespace {

constexpr auto kLongSleep = std::chrono::seconds(20);
// Renewals of a rank's membership in the time of its lease.
constexpr int kRenewals = 6;
// Time for the store to report why a connection has ended.
constexpr auto kVerdictTime = std::chrono::milliseconds(500), kVerdictNap = kVerdictTime / 5;

// Makes a broken connection an error, not a signal.
void block_sigpipe() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

}  // namespace

void Engine::start_and_serve(const Start& start) {
  std::exception_ptr error;
  block_sigpipe();
  try {
    find_the_others(start(*this));
  } catch (...) {
    error = std::current_exception();
  }
  {
    std::lock_guard lock(mutex_);
    start_error_ = error;
    started_ = true;
  }
  start_.notify_all();
  if (!error) serve();
}

void Engine::serve() {
  block_sigpipe();
  const auto guard = [this](const auto& work) {
    try {
      work();
    } catch (const std::exception& error) {
      note_failure(error.what());
    }
  };
  guard([&] { receive_from_store(); });  // what has arrived during the start
  bool stays = true;
  while (stays) guard([&] { stays = serve_once(); });
  guard([&] { say_goodbye(); });
}

// Advances everything once. False if this rank leaves.
bool Engine::serve_once() {
  renew_lease();
  bool moved = take_posted();
  moved |= !thread_failure_ && transport_->progress();
  moved |= run_call();
  moved |= take_from_store();
  check_lost_connections();
  check_corrupt_messages();
  if (moved) return true;
  bool awaited = false;
  {
    std::lock_guard lock(mutex_);
    if (stopping_ && posted_.empty()) return false;
    awaited = expecting_ > 0;
  }
  const bool is_quiet = lost_connections_.empty() && corrupt_messages_.empty();
  transport_->sleep(awaited, is_quiet ? renewal_time() : std::chrono::microseconds(kVerdictNap));
  return true;
}

// Ends this run or the next one on all ranks, and every later one of this process: nothing is sent
// or received any more.
void Engine::note_failure(const std::string& what) {
  const std::string reason = fmt::format("its communication thread has failed: {}", what);
  uint64_t run = 0;
  bool running = false;
  {
    std::lock_guard lock(mutex_);
    running = running_;
    run = running_ ? run_ : run_ + 1;
    if (!thread_failure_) thread_failure_ = reason;
    calling_ = false;
  }
  called_.notify_all();
  if (!running) log_message(LogLevel::warn, fmt::format("rank {}: {}", rank_, reason));
  notify_abort(run, reason, rank_);
}

bool Engine::take_posted() {
  std::vector<Posted> posted;
  {
    std::lock_guard lock(mutex_);
    posted.swap(posted_);
  }
  for (auto& item : posted) {
    thread_failure_ ? item.message->release()
                    : transport_->send(item.peer, std::move(item.message));
  }
  return !posted.empty();
}

bool Engine::run_call() {
  std::function<void()> work;
  {
    std::lock_guard lock(mutex_);
    if (!call_) return false;
    work = std::exchange(call_, nullptr);
  }
  work();
  {
    std::lock_guard lock(mutex_);
    calling_ = false;
  }
  called_.notify_all();
  return true;
}

bool Engine::take_from_store() {
  return event_fd_.take_added() && receive_from_store();
}

bool Engine::receive_from_store() {
  const std::lock_guard lock(receiving_);
  if (store_gone_ || caller_receives_) return false;
  if (!store_->receive([this](const control::Event& event) { on_event(event); })) {
    note_store_gone();
  }
  ring(rank_);
  return true;
}

// The store reports a lost rank; a connection that ends although both ranks live is a loss, too.
void Engine::check_lost_connections() {
  if (lost_connections_.empty()) return;
  const auto now = FutexWaiter::Clock::now();
  for (auto lost = lost_connections_.begin(); lost != lost_connections_.end();) {
    if (now - lost->second < kVerdictTime) {
      ++lost;
      continue;
    }
    note_lost(lost->first);
    lost = lost_connections_.erase(lost);
  }
}

// A sender that aborts may change what it is sending: its notice comes within this time.
void Engine::check_corrupt_messages() {
  const auto now = FutexWaiter::Clock::now();
  while (!corrupt_messages_.empty()) {
    const CorruptMessage& first = corrupt_messages_.front();
    if (now - first.time < kVerdictNap) return;
    const bool is_current = [&] {
      const std::lock_guard lock(mutex_);
      return running_ && first.run == run_;
    }();
    if (is_current) abort(first.text);
    corrupt_messages_.pop_front();
  }
}

std::chrono::microseconds Engine::renewal_time() const {
  const std::chrono::microseconds interval(int64_t(1e6 * bootstrap_->lease_s() / kRenewals));
  return std::min<std::chrono::microseconds>(kLongSleep, interval);
}

void Engine::renew_lease() {
  const auto now = FutexWaiter::Clock::now();
  if (store_gone_ || now - renewed_ < renewal_time()) return;
  renewed_ = now;
  store_->set(fmt::format("member/{}", rank_), {}, int(bootstrap_->lease_s()));
}

/// Ranks that have not left, as "rank 2, rank 3".
std::string Engine::describe_absent() {
  const auto reply = store_->ask_missing("leave");
  const auto until = FutexWaiter::Clock::now() + std::chrono::seconds(1);
  while (!reply->here && !store_gone_ && FutexWaiter::Clock::now() < until) {
    transport_->sleep(false, std::chrono::milliseconds(10));
    take_from_store();
  }
  if (!reply->here) return "others";
  std::string text;
  for (const int rank : control::StoreClient::missing(*reply)) {
    text += fmt::format("{}rank {}", text.empty() ? "" : ", ", rank);
  }
  return text;
}

// Meets the other ranks once more: until all have come, a peer may still need this process to
// accept its messages. After a failed run it waits only long enough for the others to receive the
// abort and print their own errors, and skips the bootstrap's end (MPI_Finalize), which would wait
// for ranks that may have exited. After the deadline it reports the ranks it waits for, and leaves
// if that is harmless: mpirun terminates all ranks when one ends without MPI_Finalize.
void Engine::say_goodbye() {
  bool failed = false;
  {
    std::lock_guard lock(mutex_);
    failed = failed_ || thread_failure_;
  }
  if (!thread_failure_) transport_->notify_leave();
  const uint64_t all_runs = ~uint64_t{0};
  store_->set(fmt::format("ended/{}", rank_), std::as_bytes(std::span(&all_runs, 1)));
  const auto others =
      store_->meet({.name = "leave", .count = size_, .index = rank_, .gone_count = true});
  const auto all_left = [&] { return others->here || store_gone_; };
  const double patience = failed ? 2 : env().deadline_s;
  const auto until = control::after(patience);
  bool said = false;
  while (!all_left() || (!thread_failure_ && transport_->sending())) {
    renew_lease();
    if (FutexWaiter::Clock::now() > until) {
      if (!failed && !std::exchange(said, true)) {
        const std::string absent = describe_absent();
        log_message(
            LogLevel::warn,
            fmt::format("rank {} has ended and waited {:.3g} s for {}, which {} not: {}", rank_,
                        patience, absent, absent.find(',') == absent.npos ? "has" : "have",
                        bootstrap_->must_end_together() ? "it waits on" : "it leaves"));
      }
      if (failed || !bootstrap_->must_end_together()) break;
    }
    const bool moved = !thread_failure_ && transport_->progress();
    if (!moved && !take_from_store()) {
      transport_->sleep(false, std::chrono::milliseconds(patience < 10 ? 100 : 1000));
    }
  }
  store_->leave();
  if (!others->here || thread_failure_) return;
  transport_->close();
  bootstrap_->end();
}

}  // namespace tandem::processes
