#include "comm/processes/process_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>

#include "comm/agreement.h"
#include "core/system/env.h"
#include "observe/progress_words.h"

namespace tandem::processes {
namespace {

/// Ranks of a group that exchanges by shared memory: each writes to all others.
constexpr int kMaxDirectRanks = 64;
/// Max bytes that the ranks of a larger group exchange in one meeting: their replies are messages
/// of at most control::kMaxBlobBytes.
constexpr size_t kMeetingBytes = size_t(4) << 20;
/// A wait that lasts asks now and then whether its peer has ended its run.
constexpr auto kPatience = std::chrono::milliseconds(250);
/// Time for the messages of a rank that has ended to be taken in.
constexpr auto kLastMessages = std::chrono::seconds(2);

}  // namespace

ProcessCommunicator::ProcessCommunicator(Engine& engine, uint64_t id, int rank,
                                         std::vector<int> world_ranks, double deadline_s)
    : BaseCommunicator(rank, int(world_ranks.size()), deadline_s),
      engine_(engine),
      id_(id),
      world_ranks_(std::move(world_ranks)) {
  start(Reach::no_addresses);
}

void ProcessCommunicator::learn_ranks() const {
  if (learnt_) return;
  engine_.learn(world_ranks_, deadline_from_now());
  for (int rank = 0; rank < size_; ++rank) {
    if (engine_.shares_memory(world_ranks_[size_t(rank)])) local_ranks_.push_back(rank);
  }
  by_message_ = int(local_ranks_.size()) < size_;
  learnt_ = true;
}

ProcessCommunicator::~ProcessCommunicator() {
  if (!process_.is_this_process()) return;
  if (!all_sent()) drop_puts();
  stop();
}

std::string ProcessCommunicator::link() const {
  learn_ranks();
  if (!by_message_) return "shm";
  return env().link.empty() ? engine_.transport_name() : env().link;
}

void ProcessCommunicator::abort(const std::string& reason) {
  engine_.abort(reason);
}

FutexWaiter::Clock::time_point ProcessCommunicator::deadline_from_now() const {
  return control::after(deadline_s_);
}

bool ProcessCommunicator::all_sent() {
  const auto sent = [&] { return pending_->count == 0; };
  if (sent()) return true;
  // During exception unwinding a deadline has already passed: if each destructor waited for another
  // one, it would add up to minutes.
  if (engine_.run_timed_out() && std::uncaught_exceptions() > 0) return false;
  const WaitActivity waits("flush", -1);
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

std::string ProcessCommunicator::buffer_key(uint64_t number) const {
  return fmt::format("buffer/{:x}/{}/{:x}", id_, int64_t(number), engine_.host());
}

std::shared_ptr<ProcessBuffer> ProcessCommunicator::open_buffer(uint64_t number,
                                                                const BufferLayout& layout,
                                                                int creator) {
  const std::string key = buffer_key(number);
  const size_t bytes = local_ranks_.size() * layout.total();
  const bool shared = local_ranks_.size() > 1;
  std::shared_ptr<SharedMemory> memory;
  SharedMemory::Handle handle;
  if (creator == rank_) {
    try {
      memory = SharedMemory::create(bytes);
      handle = memory->handle();
    } catch (const IoError&) {
      if (shared) engine_.store().set(key, std::as_bytes(std::span(&handle, 1)));
      throw;
    }
    if (shared) engine_.store().set(key, std::as_bytes(std::span(&handle, 1)));
  } else {
    const auto reply = engine_.store().get(std::span(&key, 1), true);
    await(reply, {call(), creator});
    const auto values = control::StoreClient::values(*reply);
    std::memcpy(&handle, values.at(0).data(), std::min(values[0].size(), sizeof handle));
    memory = SharedMemory::open(handle, bytes);
  }
  std::vector<std::byte*> bases(static_cast<size_t>(size_), nullptr);
  for (size_t i = 0; i < local_ranks_.size(); ++i) {
    bases[size_t(local_ranks_[i])] = memory->data() + i * layout.total();
  }
  return std::make_shared<ProcessBuffer>(engine_, id_, number, rank_, layout, std::move(memory),
                                         std::move(bases));
}

std::shared_ptr<SymmetricBuffer> ProcessCommunicator::do_allocate(size_t bytes, int signals) {
  learn_ranks();
  const uint64_t number = buffers_made_++;
  std::shared_ptr<ProcessBuffer> buffer;
  agree_on([&] {
    buffer = open_buffer(number, {bytes, signals}, local_ranks_.front());
  });  // all have mapped and registered it
  buffer->seal();
  return buffer;
}

// Not collective: the first rank of a host that needs it makes it for all of the host.
std::shared_ptr<SymmetricBuffer> ProcessCommunicator::do_allocate_workspace(size_t bytes,
                                                                            int signals) {
  learn_ranks();
  int creator = rank_;
  if (local_ranks_.size() > 1) {
    // A bit for each rank, if they suffice: the second rank that needs it knows the first.
    const bool has_bits = local_ranks_.size() < 63;
    const auto index = std::ranges::find(local_ranks_, rank_) - local_ranks_.begin();
    const int64_t added = has_bits ? int64_t(1) << index : 1;
    const auto number = engine_.store().add("first/" + buffer_key(kWorkspaceBuffer), added);
    await(number, {"workspace"});
    const auto before = uint64_t(control::StoreClient::number(*number) - added);
    const bool is_known = has_bits && std::has_single_bit(before);
    if (before > 0) creator = is_known ? local_ranks_[size_t(std::countr_zero(before))] : -1;
  }
  auto buffer = open_buffer(kWorkspaceBuffer, {bytes, signals}, creator);
  if (creator == rank_) engine_.keep(buffer->memory());
  return buffer;
}

template <typename Step>
void ProcessCommunicator::agree_on(const Step& step) {
  std::string failure;
  try {
    step();
  } catch (const IoError& error) {
    failure = error.what();
  }
  const control::Met met = meet(call(), failure, {});
  if (met.differs < 0 && failure.empty()) return;
  if (engine_.run_aborted()) fail({call()}, 1, 0);  // a rank that has left took its memory along
  const bool first = met.differs < 0 || !met.first.empty();
  throw AgreedError(fmt::format("rank {}: {}", first ? 0 : met.differs,
                                met.differs < 0 ? failure
                                : first         ? met.first
                                                : met.other));
}

void ProcessCommunicator::await(const control::StoreClient::Pending& reply, const WaitSite& site) {
  if (!engine_.await(reply, deadline_from_now())) fail(site, 1, 0);
}

std::optional<int> ProcessCommunicator::find_missing(const std::string& meeting) {
  const auto reply = engine_.store().ask_missing(meeting);
  const auto until = FutexWaiter::Clock::now() + std::chrono::seconds(2);
  if (!engine_.await(reply, until)) return {};
  const auto missing = control::StoreClient::missing(*reply);
  return missing.empty() ? -1 : missing.front();
}

control::Met ProcessCommunicator::meet(std::string_view what, std::string_view compared,
                                       std::span<const std::byte> blob) {
  const uint64_t number = meetings_++;
  const std::string name = fmt::format("meet/{:x}/{}", id_, number);
  const auto reply = engine_.store().meet(
      {.name = name, .count = size_, .index = rank_, .compared = compared, .blob = blob});
  const auto deadline = deadline_from_now();
  while (!engine_.await(reply, std::min(deadline, FutexWaiter::Clock::now() + kPatience))) {
    if (engine_.run_aborted()) fail({what}, number + 1, number);
    const bool late = FutexWaiter::Clock::now() >= deadline;
    const std::optional<int> found = find_missing(name);
    if (!found && !late) continue;  // the store is busy
    const int missing = found.value_or(0);
    if (missing < 0) continue;  // the reply is on its way
    if (late) fail({what, missing}, number + 1, number);
    engine_.ask_whether_ended(world_ranks_[size_t(missing)], deadline);
    // It may have come, and left, since the store has said that it was missing.
    if (has_ended(missing) && find_missing(name) == found)
      fail({what, missing}, number + 1, number);
  }
  return control::StoreClient::met(*reply);
}

// Ranks meet until the longest blob has arrived, each with the next chunk of its own; a blob's
// first chunk follows its length. A barrier, of empty blobs, is one meeting without contents.
bool ProcessCommunicator::do_exchange(std::span<const std::byte> blob, std::string_view what,
                                      std::vector<std::vector<std::byte>>& all) {
  if (size_ <= kMaxDirectRanks) return false;
  const size_t chunk = std::max<size_t>(kMeetingBytes / size_t(size_), 1);
  uint64_t longest = 0;
  for (size_t at = 0; at == 0 || at < longest; at += chunk) {
    control::Blob local;
    const uint64_t total = blob.size();
    if (at == 0 && total > 0) {
      const auto length = std::as_bytes(std::span(&total, 1));
      local.assign(length.begin(), length.end());
    }
    const auto next = blob.subspan(std::min(at, blob.size()));
    local.insert(local.end(), next.begin(), next.begin() + int64_t(std::min(chunk, next.size())));
    const control::Met met = meet(what, what, local);
    if (met.differs >= 0) {
      throw Mismatch(fmt::format("rank 0 is in {}, rank {} in {}: expected the same call",
                                 met.first, met.differs, met.other));
    }
    for (size_t rank = 0; rank < met.blobs.size(); ++rank) {
      std::span<const std::byte> remote = met.blobs[rank];
      if (at == 0 && !remote.empty()) {
        uint64_t length = 0;
        std::memcpy(&length, remote.data(), sizeof length);
        longest = std::max(longest, length);
        remote = remote.subspan(sizeof length);
      }
      all[rank].insert(all[rank].end(), remote.begin(), remote.end());
    }
  }
  return true;
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
  const WaitActivity waits(site.op, site.peer < 0 ? -1 : world_ranks_[size_t(site.peer)]);
  const auto deadline = deadline_from_now();
  const auto slice = [&] { return std::min(deadline, FutexWaiter::Clock::now() + kPatience); };
  while (!wait_until(raised, slice(), by_message_)) {
    if (engine_.run_aborted() || FutexWaiter::Clock::now() >= deadline) break;
    if (site.peer < 0) continue;
    engine_.ask_whether_ended(world_ranks_[size_t(site.peer)], deadline);
    if (!has_ended(site.peer)) continue;
    // All that it sent is here or on its way.
    if (wait_until(raised, std::min(deadline, FutexWaiter::Clock::now() + kLastMessages),
                   by_message_)) {
      return;
    }
    break;
  }
  if (!raised()) fail(site, epoch, word.load());
}

std::unique_ptr<Communicator> ProcessCommunicator::do_group(const std::string& name,
                                                            const std::vector<int>& members,
                                                            int index) {
  std::vector<int> world_ranks;
  std::string unique = fmt::format("{:x} {}", id_, name);
  for (const int member : members) {
    world_ranks.push_back(world_ranks_[size_t(member)]);
    unique += fmt::format(" {}", world_ranks.back());
  }
  return std::make_unique<ProcessCommunicator>(engine_, engine_.add_group(unique), index,
                                               std::move(world_ranks), deadline_s_);
}

}  // namespace tandem::processes
