#include "comm/threads/threads_communicator.h"

#include "comm/wait_check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <cstring>
#include <exception>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tandem::threads {
namespace {

class ThreadsBuffer final : public SymmetricBuffer {
 public:
  ThreadsBuffer(std::shared_ptr<Segments> segments, int rank, size_t bytes, int signals,
                bool direct)
      : segments_(std::move(segments)), rank_(rank), direct_(direct) {
    local_ = segments_->memory(rank);
    bytes_ = bytes;
    signals_ = signals;
  }
  std::byte* peer(int rank) const override {
    return direct_ || rank == rank_ ? segments_->memory(rank) : nullptr;
  }
  const std::shared_ptr<Segments>& segments() const { return segments_; }

 private:
  std::shared_ptr<Segments> segments_;
  int rank_;
  bool direct_;
};

constexpr int kSmallGroup = 64;

const std::shared_ptr<Segments>& get_segments(const SymmetricBuffer& buffer) {
  return static_cast<const ThreadsBuffer&>(buffer).segments();
}

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

ThreadsCommunicator::ThreadsCommunicator(std::shared_ptr<Group> group, int rank, double deadline_s)
    : BaseCommunicator(rank, int(group->world_ranks.size()), deadline_s),
      group_(std::move(group)),
      link_(group_->world->link_of(group_->world_ranks[size_t(rank)])) {
  // Bytes that bypass an emulated link must not arrive.
  start(link_ ? Reach::addresses_only : Reach::direct);
  // In small groups errors tell from the first call on which call a late rank is in.
  if (size_ <= kSmallGroup) make_workspace();
}

std::byte* ThreadsCommunicator::look_at(const SymmetricBuffer& buffer, int rank) const {
  return get_segments(buffer)->memory(rank);
}

std::string ThreadsCommunicator::link() const {
  return group_->world->link ? group_->world->link->describe() : "shm";
}

// During exception unwinding, flush only waits until sources are copied, and not repeatedly for a
// slow link.
void ThreadsCommunicator::flush() {
  if (!link_ || !process_.is_this_process()) return;
  if (std::uncaught_exceptions() > 0) return settle();
  if (!link_->flush(group_->world->aborted(), deadline_from_now())) {
    settle();
    throw Timeout({"flush"}, rank_, 0, 0, deadline_s_);
  }
}

void ThreadsCommunicator::drain() {
  if (link_ && !link_->drain(group_->world->aborted(), deadline_from_now())) {
    throw Timeout({"last transfers"}, rank_, 0, 0, deadline_s_);
  }
}

void ThreadsCommunicator::settle() const {
  if (link_ && process_.is_this_process()) link_->settle();
}

std::chrono::steady_clock::time_point ThreadsCommunicator::deadline_from_now() const {
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                                std::chrono::duration<double>(deadline_s_));
}

void ThreadsCommunicator::abort(const std::string& reason) {
  if (!process_.is_this_process()) return;
  group_->world->abort(group_->world_ranks[size_t(rank_)], reason);
}

std::shared_ptr<SymmetricBuffer> ThreadsCommunicator::obtain_buffer(const std::string& name,
                                                                    size_t bytes, int signals) {
  auto segments = std::static_pointer_cast<Segments>(group_->obtain(
      name, size_, [&] { return std::make_shared<Segments>(size_, bytes, signals); }));
  return std::make_shared<ThreadsBuffer>(std::move(segments), rank_, bytes, signals,
                                         !group_->world->link);
}

std::shared_ptr<SymmetricBuffer> ThreadsCommunicator::do_allocate(size_t bytes, int signals) {
  return obtain_buffer(fmt::format("buffer {}", allocations_++), bytes, signals);
}

std::shared_ptr<SymmetricBuffer> ThreadsCommunicator::do_allocate_workspace(size_t bytes,
                                                                            int signals) {
  return obtain_buffer("workspace", bytes, signals);
}

void ThreadsCommunicator::do_put(int peer, SymmetricBuffer& buffer, size_t offset,
                                 const void* source, size_t bytes, int signal, uint64_t epoch) {
  const auto& segments = get_segments(buffer);
  std::byte* to = segments->memory(peer) + offset;
  SignalWord& word = segments->signal(peer, signal);
  FutexWaiter& waiter = group_->waiters[size_t(peer)];
  if (link_ && peer != rank_) {
    link_->start({{segments, group_},
                  to,
                  static_cast<const std::byte*>(source),
                  bytes,
                  &word,
                  epoch,
                  &waiter,
                  group_->world_ranks[size_t(peer)]});
    return;
  }
  if (bytes) std::memcpy(to, source, bytes);
  raise_signal(word, epoch, waiter);
}

void ThreadsCommunicator::do_raise(int peer, SymmetricBuffer& buffer, int signal, uint64_t epoch) {
  raise_signal(get_segments(buffer)->signal(peer, signal), epoch, group_->waiters[size_t(peer)]);
}

uint64_t ThreadsCommunicator::do_read_signal(const SymmetricBuffer& buffer, int signal) const {
  return get_segments(buffer)->signal(rank_, signal).load(std::memory_order_acquire);
}

void ThreadsCommunicator::do_wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
                                  const WaitSite& site) {
  const SharedWorld& world = *group_->world;
  const SignalWord& word = get_segments(buffer)->signal(rank_, signal);
  if (world.aborted()) {
    settle();
    world.throw_aborted();
  }
  for (int i = 0; i < world.spins; ++i) {
    if (word.load(std::memory_order_acquire) >= epoch) return;
    pause();
  }
  if (word.load(std::memory_order_acquire) >= epoch) return;

  const auto deadline = deadline_from_now();
  FutexWaiter& waiter = group_->waiters[size_t(rank_)];
  struct Wanted {
    FutexWaiter& waiter;
    ~Wanted() { waiter.wanted.store(nullptr, std::memory_order_relaxed); }
  } const wanted{waiter};
  waiter.wanted.store(&word);
  while (true) {
    const uint32_t seen = waiter.rings.load();
    if (word.load() >= epoch) break;
    const bool aborted = world.aborted();
    if (aborted || std::chrono::steady_clock::now() >= deadline) {
      settle();
      if (aborted) world.throw_aborted();
      throw Timeout(site, rank_, epoch, word.load(), deadline_s_);
    }
    futex_wait(waiter.rings, seen, next_wait_check(deadline));
    try {
      check_wait();
    } catch (...) {
      settle();
      throw;
    }
  }
}

std::unique_ptr<Communicator> ThreadsCommunicator::do_group(const std::string& name,
                                                            const std::vector<int>& members,
                                                            int index) {
  const std::string unique = fmt::format("group {} {}", name, fmt::join(members, " "));
  auto group = std::static_pointer_cast<Group>(group_->obtain(unique, int(members.size()), [&] {
    std::vector<int> world_ranks;
    for (const int member : members) world_ranks.push_back(group_->world_ranks[size_t(member)]);
    return std::make_shared<Group>(group_->world, std::move(world_ranks));
  }));
  return std::make_unique<ThreadsCommunicator>(std::move(group), index, deadline_s_);
}

}  // namespace tandem::threads
