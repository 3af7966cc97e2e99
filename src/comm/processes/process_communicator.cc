#include "comm/processes/process_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "comm/agreement.h"
#include "comm/processes/process_buffer.h"
#include "core/env.h"

namespace tandem::processes {
ProcessCommunicator::ProcessCommunicator(Engine& engine, uint64_t id, int rank,
                                         std::vector<int> world_ranks, double deadline_s)
    : BaseCommunicator(rank, int(world_ranks.size()), deadline_s),
      engine_(engine),
      id_(id),
      world_ranks_(std::move(world_ranks)) {
  by_message_ = !std::all_of(world_ranks_.begin(), world_ranks_.end(),
                             [&](int r) { return engine_.shares_memory(r); });
  start(Reach::no_addresses);
}

ProcessCommunicator::~ProcessCommunicator() {
  if (!process_.is_this_process()) return;
  if (!all_sent()) drop_puts();
  stop();
}

std::string ProcessCommunicator::link() const {
  if (!by_message_) return "shm";
  return env().link.empty() ? engine_.transport_name() : env().link;
}

void ProcessCommunicator::abort(const std::string& reason) {
  engine_.abort(reason);
}

FutexWaiter::Clock::time_point ProcessCommunicator::deadline_from_now() const {
  return FutexWaiter::Clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                         std::chrono::duration<double>(deadline_s_));
}

bool ProcessCommunicator::all_sent() {
  const auto sent = [&] { return pending_->count == 0; };
  if (sent()) return true;
  // During exception unwinding a deadline has already passed: if each destructor waited for another
  // one, it would add up to minutes.
  if (engine_.run_timed_out() && std::uncaught_exceptions() > 0) return false;
  return engine_.wait(sent, deadline_from_now(), by_message_);
}

void ProcessCommunicator::drop_puts() {
  if (stuck_) return;
  pending_->cancelled = true;
  engine_.wake();
  const auto patience = FutexWaiter::Clock::now() + std::chrono::seconds(2);
  while (pending_->count > 0 && FutexWaiter::Clock::now() < patience) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  stuck_ = pending_->count > 0;
  if (!stuck_) pending_->cancelled = false;
}

void ProcessCommunicator::fail(const WaitSite& site, uint64_t epoch, uint64_t seen) {
  drop_puts();
  if (const auto notice = engine_.aborted()) throw Aborted(notice->origin, notice->reason);
  if (has_ended(site.peer)) {
    throw Aborted(world_ranks_[size_t(site.peer)],
                  fmt::format("{}: it has left the world", site.op));
  }
  engine_.note_timeout();
  throw Timeout(site, rank_, epoch, seen, deadline_s_);
}

template <typename Ready>
bool ProcessCommunicator::wait_until(const Ready& ready, FutexWaiter::Clock::time_point deadline,
                                     bool by_message) {
  try {
    return engine_.wait(ready, deadline, by_message, true);
  } catch (...) {
    drop_puts();
    throw;
  }
}

bool ProcessCommunicator::has_ended(int peer) const {
  return peer >= 0 && engine_.has_ended(world_ranks_[size_t(peer)]);
}

void ProcessCommunicator::flush() {
  if (!process_.is_this_process()) return;
  if (!all_sent()) fail({"flush"}, 0, uint64_t(pending_->count));
}

std::shared_ptr<SymmetricBuffer> ProcessCommunicator::do_allocate(size_t bytes, int signals) {
  const BufferLayout layout{bytes, signals};
  std::shared_ptr<SharedMemory> memory;
  agree_on([&] { memory = SharedMemory::create(layout.total()); });
  const auto handle = memory->handle();
  const auto handles = gather_blobs(std::as_bytes(std::span(&handle, 1)), "allocate");
  std::shared_ptr<ProcessBuffer> buffer;
  const uint64_t number = buffers_made_++;
  agree_on([&] {
    std::vector<std::shared_ptr<SharedMemory>> peers(static_cast<size_t>(size_));
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) peers[size_t(peer)] = memory;
      if (peer == rank_ || !engine_.shares_memory(world_ranks_[size_t(peer)])) continue;
      SharedMemory::Handle remote;
      std::memcpy(&remote, handles[size_t(peer)].data(), sizeof remote);
      peers[size_t(peer)] = SharedMemory::open(remote, layout.total());
    }
    buffer = std::make_shared<ProcessBuffer>(engine_, id_, number, rank_, layout, std::move(peers));
  });  // all have mapped and registered it
  memory->seal();
  return buffer;
}

template <typename Step>
void ProcessCommunicator::agree_on(const Step& step) {
  std::string failure;
  try {
    step();
  } catch (const Error& error) {
    failure = error.what();
  }
  const auto exchanged =
      gather_blobs(std::as_bytes(std::span(failure.data(), failure.size())), "allocate");
  if (const std::string first = first_failure(exchanged); !first.empty()) throw AgreedError(first);
}

void ProcessCommunicator::do_put(int peer, SymmetricBuffer& buffer, size_t offset,
                                 const void* source, size_t bytes, int signal, uint64_t epoch) {
  const auto& target = static_cast<const ProcessBuffer&>(buffer);
  if (std::byte* memory = target.peer(peer)) {
    if (bytes) std::memmove(memory + offset, source, bytes);
    raise_signal(target.signal(peer, signal), epoch);
    engine_.ring(world_ranks_[size_t(peer)]);
    return;
  }
  const auto* from = static_cast<const std::byte*>(source);
  const size_t chunk = engine_.chunk_bytes();
  for (; bytes > chunk; bytes -= chunk) {
    send_put(peer, {MessageKind::put, -1, id_, target.number(), offset, chunk, 0}, from);
    offset += chunk;
    from += chunk;
  }
  send_put(peer, {MessageKind::put, signal, id_, target.number(), offset, bytes, epoch}, from);
}

void ProcessCommunicator::send_put(int peer, const Header& header, const void* source) {
  auto message = std::make_unique<Outgoing>();
  message->header = header;
  if (header.bytes > kInlineBytes) {
    message->payload = source;
    message->pending = pending_;
    ++pending_->count;
  } else if (header.bytes > 0) {
    const auto* from = static_cast<const std::byte*>(source);
    message->contents.assign(from, from + header.bytes);
  }
  engine_.post(world_ranks_[size_t(peer)], std::move(message));
}

uint64_t ProcessCommunicator::do_read_signal(const SymmetricBuffer& buffer, int signal) const {
  uint64_t& word = static_cast<const ProcessBuffer&>(buffer).signal(rank_, signal);
  return std::atomic_ref(word).load(std::memory_order_acquire);
}

void ProcessCommunicator::do_wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
                                  const WaitSite& site) {
  const std::atomic_ref word(static_cast<const ProcessBuffer&>(buffer).signal(rank_, signal));
  const auto raised = [&] { return word.load(std::memory_order_acquire) >= epoch; };
  if (engine_.run_aborted()) fail(site, epoch, word.load());
  if (raised()) return;
  const auto decided = [&] {
    const bool ended =
        has_ended(site.peer);  // read before the signal, to see all that it sent before it ended
    return raised() || ended;
  };
  if (!wait_until(decided, deadline_from_now(), by_message_) || !raised()) {
    fail(site, epoch, word.load());
  }
}

std::unique_ptr<Communicator> ProcessCommunicator::do_split(int, const std::vector<int>& members,
                                                            int index) {
  // Id unused by all of this communicator's ranks; groups differ by their first member.
  uint64_t free_id = engine_.next_id();
  for (const auto& blob : gather_blobs(std::as_bytes(std::span(&free_id, 1)), "split")) {
    uint64_t remote = 0;
    std::memcpy(&remote, blob.data(), sizeof remote);
    free_id = std::max(free_id, remote);
  }
  engine_.set_next_id(free_id + uint64_t(size_));
  std::vector<int> world_ranks;
  for (const int member : members) world_ranks.push_back(world_ranks_[size_t(member)]);
  const int first = *std::min_element(members.begin(), members.end());
  return std::make_unique<ProcessCommunicator>(engine_, free_id + uint64_t(first), index,
                                               std::move(world_ranks), deadline_s_);
}

std::vector<Engine::Blob> ProcessCommunicator::gather_blobs(std::span<const std::byte> local,
                                                            std::string_view what) {
  const uint64_t number = gathers_++;
  for (int step = 1; step < size_; ++step) {
    auto message = std::make_unique<Outgoing>();
    message->header = {MessageKind::blob, -1, id_, 0, 0, local.size(), number};
    message->contents.assign(local.begin(), local.end());
    engine_.post(world_ranks_[size_t((rank_ + step) % size_)], std::move(message));
  }
  std::vector<Engine::Blob> all(static_cast<size_t>(size_));
  all[size_t(rank_)].assign(local.begin(), local.end());
  const auto deadline = deadline_from_now();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    std::optional<Engine::Blob> blob;
    const auto arrived = [&] {
      const bool ended = has_ended(peer);
      if (!blob) blob = engine_.take_blob(id_, number, world_ranks_[size_t(peer)]);
      return blob.has_value() || ended;
    };
    if (!wait_until(arrived, deadline, true) || !blob) fail({what, peer}, number + 1, number);
    all[size_t(peer)] = std::move(*blob);
  }
  return all;
}

}  // namespace tandem::processes
