#include "comm/processes/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "core/env.h"
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
  if (running_ || stopping_) {
    throw InvalidArgument(
        stopping_ ? "world: this process has left the others: expected to begin before"
                  : "world: one of processes is open in this process: expected it to have ended "
                    "(split makes smaller ones)");
  }
  ++run_;
  next_id_ = (run_ << 32) + 1;
  running_ = true;
  failed_ = false;
  aborts_.erase(aborts_.begin(), aborts_.lower_bound(run_));
  std::erase_if(blobs_, [&](const auto& item) { return std::get<0>(item.first) >> 32 < run_; });
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
  if (!failed) tell(MessageKind::ended, run, {}, false);
}

void Engine::add_buffer(uint64_t communicator, uint64_t buffer,
                        std::shared_ptr<LocalBuffer> memory) {
  std::lock_guard lock(mutex_);
  buffers_[{communicator, buffer}] = std::move(memory);
}

void Engine::remove_buffer(uint64_t communicator, uint64_t buffer) {
  if (!process_.is_this_process()) return;
  std::lock_guard lock(mutex_);
  buffers_.erase({communicator, buffer});
}

void Engine::post(int world_rank, std::unique_ptr<Outgoing> message, bool first) {
  {
    std::lock_guard lock(mutex_);
    posted_.push_back({world_rank, first, std::move(message)});
  }
  event_fd_.wake();
}

bool Engine::call(std::function<void()> work, FutexWaiter::Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  call_ = std::move(work);
  calling_ = true;
  event_fd_.wake();
  return called_.wait_until(lock, deadline, [&] { return !calling_; });
}

void Engine::abort(const std::string& reason, int origin) {
  if (!process_.is_this_process()) return;
  uint64_t run = 0;
  AbortNotice first;
  {
    std::lock_guard lock(mutex_);
    run = run_;
    if (std::exchange(announced_abort_, run) == run) return;
    // An earlier notice is passed on: the others may not have received it, and would otherwise name
    // this rank, which leaves.
    first =
        aborts_.try_emplace(run, AbortNotice{origin < 0 ? rank_ : origin, reason}).first->second;
    run_aborted_ = true;
  }
  ring(rank_);
  tell(MessageKind::abort, run, std::string_view(first.reason).substr(0, kInlineBytes), true,
       first.origin);
}

void Engine::tell(MessageKind kind, uint64_t run, std::string_view text, bool first, int origin) {
  const auto bytes = std::as_bytes(std::span(text));
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    auto message = std::make_unique<Outgoing>();
    message->header = {kind, origin, run, 0, 0, bytes.size(), 0};
    message->contents.assign(bytes.begin(), bytes.end());
    post(peer, std::move(message), first);
  }
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

void Engine::note_end(int source, uint64_t run) {
  auto& ended = ended_[size_t(source)];
  if (ended.load(std::memory_order_relaxed) < run) ended.store(run, std::memory_order_release);
  ring(rank_);
}

std::optional<Engine::Blob> Engine::take_blob(uint64_t communicator, uint64_t epoch, int source) {
  std::lock_guard lock(mutex_);
  const auto found = blobs_.find({communicator, epoch, source});
  if (found == blobs_.end()) return std::nullopt;
  Blob blob = std::move(found->second);
  blobs_.erase(found);
  return blob;
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
  if (header.signal < 0) return;
  raise_signal(buffer.signals[header.signal], header.epoch);
  ring(rank_);
}

void Engine::on_message(int source, const Header& header, std::vector<std::byte> contents) {
  switch (header.kind) {
    case MessageKind::put:
    case MessageKind::taken:
      return;
    case MessageKind::blob: {
      std::lock_guard lock(mutex_);
      if (header.communicator >> 32 < run_) return;
      blobs_[{header.communicator, header.epoch, source}] = std::move(contents);
      break;
    }
    case MessageKind::abort:
      note_abort(header.communicator, header.signal,
                 {reinterpret_cast<const char*>(contents.data()), contents.size()});
      return;
    case MessageKind::ended:
      return note_end(source, header.communicator);
    case MessageKind::leave:
      left_[size_t(source)] = true;
      return note_end(source, std::numeric_limits<uint64_t>::max());
  }
  ring(rank_);
}

void Engine::on_sent() {
  ring(rank_);
}

void Engine::on_lost(int source) {
  left_[size_t(source)] = true;
  uint64_t run = 0;
  {
    std::lock_guard lock(mutex_);
    run = running_ ? run_ : run_ + 1;
  }
  note_abort(run, source, "its process is gone");
}

}  // namespace tandem::processes
