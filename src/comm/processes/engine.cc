#include "comm/processes/engine.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "core/system/env.h"
#include "observe/progress_words.h"
#include "tandem/error.h"

namespace tandem::processes {

Engine::Engine(std::unique_ptr<Bootstrap> bootstrap) {
  find_the_others(std::move(bootstrap));
  thread_ = std::thread([this] { serve(); });
}

Engine::Engine(const Start& start) {
  env();  // throws here on the caller's thread, not on the communication thread
  thread_ = std::thread([this, &start] { start_and_serve(start); });
  std::unique_lock lock(mutex_);
  start_.wait(lock, [&] { return started_; });
  if (!start_error_) return;
  lock.unlock();
  thread_.join();
  std::rethrow_exception(start_error_);
}

Engine::~Engine() {
  leave();
  if (process_.is_this_process()) return;
  static_cast<void>(bootstrap_.release());  // both belong to the parent and its peers
  static_cast<void>(transport_.release());
  static_cast<void>(store_.release());
}

void Engine::leave() {
  if (!thread_.joinable()) return;
  if (!process_.is_this_process()) return thread_.detach();
  bool early = false;
  {
    std::lock_guard lock(mutex_);
    early = running_;
  }
  if (early) abort("the process ended inside its run");
  {
    std::lock_guard lock(mutex_);
    failed_ |= early;
    stopping_ = true;
  }
  event_fd_.wake();
  bool stuck = false;
  {
    std::lock_guard lock(mutex_);
    stuck = calling_ && failed_;
  }
  if (stuck) {
    thread_.detach();  // inside a call that waits for a rank that may have exited
  } else {
    thread_.join();
  }
}

uint64_t Engine::begin_run() {
  if (!process_.is_this_process()) {
    throw InvalidArgument(fmt::format(
        "world: this process was forked from rank {} after it had met the others: expected a world "
        "of threads (World), or a process that the launcher started",
        rank_));
  }
  std::lock_guard lock(mutex_);
  if (thread_failure_) throw Aborted(rank_, *thread_failure_);
  if (running_ || stopping_) {
    throw InvalidArgument(
        stopping_ ? "world: this process has left the others: expected to begin before"
                  : "world: one of processes is open in this process: expected it to have ended "
                    "(split makes smaller ones)");
  }
  ++run_;
  groups_.clear();
  late_memory_.clear();
  running_ = true;
  failed_ = false;
  aborts_.erase(aborts_.begin(), aborts_.lower_bound(run_));
  std::erase_if(early_closed_, [&](uint64_t id) { return id >> kRunShift < run_; });
  run_aborted_ = aborts_.contains(run_);
  run_timed_out_ = false;
  return run_;
}

void Engine::end_run(bool failed) {
  if (!process_.is_this_process()) return;
  uint64_t run = 0;
  {
    std::lock_guard lock(mutex_);
    running_ = false;
    failed_ = failed;
    run = run_;
  }
  if (!failed) store_->set(fmt::format("ended/{}", rank_), std::as_bytes(std::span(&run, 1)));
}

void Engine::add_buffer(uint64_t communicator, uint64_t buffer,
                        std::shared_ptr<LocalBuffer> memory) {
  {
    std::lock_guard lock(mutex_);
    buffers_[{communicator, buffer}] = std::move(memory);
  }
  if (buffer == kWorkspaceBuffer) event_fd_.wake();  // contents may be waiting for it
}

void Engine::remove_buffer(uint64_t communicator, uint64_t buffer) {
  if (!process_.is_this_process()) return;
  std::lock_guard lock(mutex_);
  buffers_.erase({communicator, buffer});
  if (buffer == kWorkspaceBuffer) early_closed_.insert(communicator);
}

void Engine::post(int world_rank, std::unique_ptr<Outgoing> message) {
  {
    std::lock_guard lock(mutex_);
    posted_.push_back({world_rank, std::move(message)});
  }
  event_fd_.wake();
}

bool Engine::call(std::function<void()> work, FutexWaiter::Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  call_ = std::move(work);
  calling_ = true;
  event_fd_.wake();
  return called_.wait_until(lock, deadline, [&] { return !calling_; }) && !thread_failure_;
}

void Engine::abort(const std::string& reason, int origin) {
  if (!process_.is_this_process()) return;
  uint64_t run = 0;
  {
    std::lock_guard lock(mutex_);
    run = run_;
  }
  notify_abort(run, reason, origin < 0 ? rank_ : origin);
}

void Engine::notify_abort(uint64_t run, const std::string& reason, int origin) {
  AbortNotice first;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(announced_abort_, run) == run) return;
    // An earlier notice is passed on: the others may not have received it, and would otherwise name
    // this rank, which leaves.
    first = aborts_.try_emplace(run, AbortNotice{origin, reason}).first->second;
    if (run == run_) run_aborted_ = true;
  }
  ring(rank_);
  const auto reason_sent = std::string_view(first.reason).substr(0, kInlineBytes);
  store_->set(fmt::format("abort/{}", run), control::make_abort_value(first.origin, reason_sent));
}

std::optional<AbortNotice> Engine::aborted() const {
  std::lock_guard lock(mutex_);
  const auto found = aborts_.find(run_);
  if (found == aborts_.end()) return std::nullopt;
  return found->second;
}

void Engine::note_abort(uint64_t run, int origin, const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (run < run_) return;
    aborts_.try_emplace(run, AbortNotice{origin, reason});
    if (run == run_) run_aborted_ = true;
  }
  ring(rank_);
}

void Engine::expect(int change) {
  {
    std::lock_guard lock(mutex_);
    expecting_ += change;
  }
  if (change > 0) event_fd_.wake();
}

std::shared_ptr<LocalBuffer> Engine::find_buffer(const Header& header) {
  std::lock_guard lock(mutex_);
  const auto found = buffers_.find({header.communicator, header.buffer});
  return found == buffers_.end() ? nullptr : found->second;
}

void Engine::on_put(LocalBuffer& buffer, const Header& header) {
  if (header.signal < 0 || header.communicator >> kRunShift == corrupt_run_) return;
  raise_signal(buffer.signals[header.signal], header.epoch);
  ring(rank_);
}

void Engine::note_corrupt(uint64_t run, std::string text) {
  corrupt_run_ = run;
  corrupt_messages_.push_back({FutexWaiter::Clock::now(), run, std::move(text)});
}

void Engine::on_corrupt(int source, const Header& header) {
  note_corrupt(header.communicator >> kRunShift,
               fmt::format("the message of {} bytes from rank {} to rank {} is corrupt: its hash "
                           "differs from the sender's",
                           header.bytes, source, rank_));
}

void Engine::on_corrupt_header(int source) {
  uint64_t run = 0;
  {
    std::lock_guard lock(mutex_);
    run = run_;
  }
  note_corrupt(run, fmt::format("the header of a message from rank {} to rank {} is corrupt: its "
                                "hash differs from the sender's",
                                source, rank_));
}

bool Engine::is_early(const Header& header) {
  if (header.buffer != kWorkspaceBuffer) return false;
  std::lock_guard lock(mutex_);
  return !stopping_ && !buffers_.contains({header.communicator, header.buffer}) &&
         header.communicator >> kRunShift >= run_ && !early_closed_.contains(header.communicator);
}

void Engine::on_sent() {
  ring(rank_);
}

void Engine::on_lost(int source) {
  lost_connections_.emplace(source, FutexWaiter::Clock::now());
}

void Engine::on_unreachable(int peer, const std::string& why) {
  abort(
      fmt::format("connecting to rank {}: {} (needed: a network between them, and file "
                  "descriptors: ulimit -n)",
                  peer, why));
}

void Engine::note_lost(int source) {
  uint64_t run = 0;
  {
    std::lock_guard lock(mutex_);
    run = running_ ? run_ : run_ + 1;
  }
  note_abort(run, source, "its process is gone");
}

void Engine::on_event(const control::Event& event) {
  const uint64_t number = control::number_of_key(event.key);
  const auto notice = control::read_abort_value(event.value);
  if (event.key.starts_with("abort/") && notice) {
    note_abort(number, notice->origin, notice->reason);
  } else if (event.change == control::Change::lost || event.change == control::Change::expired) {
    note_lost(int(number));
  }
}

void Engine::note_store_gone() {
  if (store_gone_.exchange(true)) return;
  event_fd_.remove(store_->fd());
  note_lost(0);
}

// The first thread that waits receives itself, which saves waking two threads for a reply; further
// ones, and the application when none waits, have the communication thread receive.
bool Engine::await(const control::StoreClient::Pending& reply,
                   FutexWaiter::Clock::time_point deadline) {
  const WaitActivity waits("store", -1);
  if (caller_receives_.exchange(true)) {
    return wait([&] { return reply->here.load(std::memory_order_acquire); }, deadline, true, true);
  }
  struct Receiving {
    Engine& engine;
    explicit Receiving(Engine& of) : engine(of) {
      engine.event_fd_.heed(engine.store_->fd(), false);
    }
    ~Receiving() {
      engine.caller_receives_ = false;
      if (!engine.store_gone_) engine.event_fd_.heed(engine.store_->fd(), true);
    }
  } const receiving(*this);
  return receive_until(*reply, deadline);
}

bool Engine::receive_until(const control::StoreClient::Reply& reply,
                           FutexWaiter::Clock::time_point deadline) {
  while (true) {
    bool alive = false;
    {
      // The communication thread does not receive once this was locked: it could take the reply,
      // and nothing would end the wait below.
      const std::lock_guard lock(receiving_);
      alive = store_->receive([this](const control::Event& event) { on_event(event); });
    }
    ring(rank_);
    if (reply.here) return true;
    if (!alive) note_store_gone();
    if (!alive || run_aborted() || FutexWaiter::Clock::now() >= deadline) return reply.here;
    control::wait_until(store_->fd(), POLLIN, next_wait_check(deadline));
    check_wait();
  }
}

uint64_t Engine::add_group(const std::string& name) {
  const uint64_t mask = (uint64_t{1} << kRunShift) - 1;
  std::lock_guard lock(mutex_);
  const uint64_t id = run_ << kRunShift | (control::number_of_meeting(name) & mask);
  const auto [entry, added] = groups_.emplace(id, name);
  if (!added) {
    throw Unsupported(fmt::format(
        "group '{}': it has the number of group '{}' of this rank: expected names that differ",
        name, entry->second));
  }
  return id;
}

void Engine::learn(std::span<const int> world_ranks, FutexWaiter::Clock::time_point deadline) {
  if (one_host_ && memory_shared_) return;
  constexpr size_t kAtOnce = 512;
  std::vector<int> unknown;
  {
    std::lock_guard lock(mutex_);
    for (const int rank : world_ranks) {
      if (!addresses_.contains(rank)) unknown.push_back(rank);
    }
  }
  for (size_t at = 0; at < unknown.size(); at += kAtOnce) {
    const auto some = std::span(unknown).subspan(at, std::min(kAtOnce, unknown.size() - at));
    std::vector<std::string> keys;
    for (const int rank : some) keys.push_back(fmt::format("address/{}", rank));
    const auto reply = store_->get(keys, true);
    if (!await(reply, deadline)) {
      if (const auto notice = aborted()) throw Aborted(notice->origin, notice->reason);
      throw Timeout({"addresses", some.front()}, rank_, 0, 0, bootstrap_->deadline_s());
    }
    const auto values = control::StoreClient::values(*reply);
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < some.size(); ++i) {
      PeerAddress& address = addresses_[some[i]];
      std::memcpy(&address, values.at(i).data(), std::min(values[i].size(), sizeof address));
    }
  }
}

bool Engine::shares_memory(int world_rank) const {
  if (one_host_ || !memory_shared_ || world_rank == rank_) {
    return memory_shared_ || world_rank == rank_;
  }
  std::lock_guard lock(mutex_);
  const auto found = addresses_.find(world_rank);
  return found != addresses_.end() && found->second.host == host_ && found->second.shares_memory;
}

void Engine::ask_whether_ended(int world_rank, FutexWaiter::Clock::time_point deadline) {
  const std::string key = fmt::format("ended/{}", world_rank);
  const auto reply = store_->get(std::span(&key, 1), false);
  if (!await(reply, deadline)) return;
  const auto values = control::StoreClient::values(*reply);
  uint64_t run = 0;
  if (values.at(0).size() != sizeof run) return;
  std::memcpy(&run, values[0].data(), sizeof run);
  ended_[size_t(world_rank)].store(run, std::memory_order_release);
}

}  // namespace tandem::processes
