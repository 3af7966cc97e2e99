// Communication thread of Engine.

#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>

#include "comm/processes/engine.h"
#include "core/env.h"
#include "core/log.h"

namespace tandem::processes {
namespace {

constexpr auto kLongSleep = std::chrono::seconds(20);
// A rank that does not renew its membership for so long counts as lost: a host that is cut off.
constexpr double kMinLeaseSeconds = 120;
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
  receive_from_store();  // what has arrived during the start
  while (true) {
    bool moved = take_posted();
    moved |= transport_->progress();
    moved |= run_call();
    moved |= take_from_store();
    check_lost_connections();
    check_corrupt_messages();
    if (moved) continue;
    bool awaited = false;
    {
      std::lock_guard lock(mutex_);
      if (stopping_ && posted_.empty()) break;
      awaited = expecting_ > 0;
    }
    renew_lease();
    const bool is_quiet = lost_connections_.empty() && corrupt_messages_.empty();
    transport_->sleep(awaited, is_quiet ? kLongSleep : kVerdictNap);
  }
  say_goodbye();
}

bool Engine::take_posted() {
  std::vector<Posted> posted;
  {
    std::lock_guard lock(mutex_);
    posted.swap(posted_);
  }
  for (auto& item : posted) transport_->send(item.peer, std::move(item.message));
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

void Engine::renew_lease() {
  const auto now = FutexWaiter::Clock::now();
  if (store_gone_ || now - renewed_ < kLongSleep) return;
  renewed_ = now;
  const double lease_s = std::clamp(2 * bootstrap_->deadline_s(), kMinLeaseSeconds, 1e9);
  store_->set(fmt::format("member/{}", rank_), {}, int(lease_s));
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
    failed = failed_;
  }
  transport_->notify_leave();
  const uint64_t all_runs = ~uint64_t{0};
  store_->set(fmt::format("ended/{}", rank_), std::as_bytes(std::span(&all_runs, 1)));
  const auto others =
      store_->meet({.name = "leave", .count = size_, .index = rank_, .gone_count = true});
  const auto all_left = [&] { return others->here || store_gone_; };
  using Seconds = std::chrono::duration<double>;
  const double patience = failed ? 2 : env().deadline_s;
  const auto until = FutexWaiter::Clock::now() +
                     std::chrono::duration_cast<FutexWaiter::Clock::duration>(Seconds(patience));
  bool said = false;
  while (!all_left() || transport_->sending()) {
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
    if (!transport_->progress() && !take_from_store()) {
      transport_->sleep(false, std::chrono::milliseconds(patience < 10 ? 100 : 1000));
    }
  }
  store_->leave();
  if (!others->here) return;
  transport_->close();
  bootstrap_->end();
}

}  // namespace tandem::processes
