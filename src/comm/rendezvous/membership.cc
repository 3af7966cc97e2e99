#include "comm/rendezvous/membership.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "core/system/env.h"
#include "core/system/process/file_limit.h"
#include "tandem/error.h"

namespace tandem::control {
namespace {

constexpr size_t kSlotBytes = 128, kHeadBytes = 256;
static_assert(sizeof(MemberSlot) <= kSlotBytes && sizeof(BoardHead) <= kHeadBytes);
static_assert(std::atomic<int64_t>::is_always_lock_free);

}  // namespace

Board::Board(int slots, const std::string& run_id)
    : fd_(memfd_create("tandem-membership", MFD_CLOEXEC)) {
  const size_t bytes = kHeadBytes + size_t(slots) * kSlotBytes;
  if (fd_ < 0 || ftruncate(fd_, off_t(bytes)) != 0) {
    throw IoError(fmt::format("membership board: {}", describe_errno(errno)));
  }
  map(bytes);
  head_->slots = slots;
  std::snprintf(head_->run_id, sizeof head_->run_id, "%s", run_id.c_str());
  for (int i = 0; i < slots; ++i) reset_slot(i, kVacant);
}

Board::Board(int fd) : fd_(fd) {
  struct stat status {};
  if (fstat(fd, &status) != 0 || size_t(status.st_size) < kHeadBytes + kSlotBytes) {
    throw InvalidArgument(fmt::format("{}: descriptor {}: expected the board of tandem launch",
                                      kMembershipVariable, fd));
  }
  map(size_t(status.st_size));
}

Board::~Board() {
  munmap(head_, bytes_);
  close(fd_);
}

void Board::map(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (at == MAP_FAILED) throw IoError(fmt::format("membership board: {}", describe_errno(errno)));
  head_ = static_cast<BoardHead*>(at);
  bytes_ = bytes;
}

MemberSlot& Board::slot(int index) const {
  auto* at = reinterpret_cast<std::byte*>(head_) + kHeadBytes + size_t(index) * kSlotBytes;
  return *reinterpret_cast<MemberSlot*>(at);
}

void Board::reset_slot(int index, int rank) {
  MemberSlot& member = slot(index);
  member.rank = rank;
  member.training = member.done = 0;
  member.fault = ProcessFault::none;
  member.step = member.first_step = -1;
  member.words.longest_work_ns = 0;
  member.words.activity = RankActivity::work;
  member.words.is_repeated = 0;
  member.words.since_ns = std::chrono::nanoseconds(Member::Clock::now().time_since_epoch()).count();
}

std::string Board::run_id(uint32_t generation) const {
  return fmt::format("{}.{}", head_->run_id, generation);
}

std::pair<int, int> Board::local_rank(int index) const {
  const int rank = slot(index).rank, host = slot(index).host;
  int lower = 0, all = 0;
  for (int i = 0; i < head_->slots; ++i) {
    const int other = slot(i).rank;
    if (other < 0 || slot(i).host != host) continue;
    ++all;
    lower += other < rank;
  }
  return {lower, all};
}

void Board::notify_change() {
  ++head_->changes;
  syscall(SYS_futex, &head_->changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

Member::Member(int fd, int slot) : board_(fd), slot_(slot) {
  if (slot >= 0 && slot < board_.head().slots) return;
  throw InvalidArgument(fmt::format("{}: slot {}: expected 0 to {}", kMembershipVariable, slot,
                                    board_.head().slots - 1));
}

Member* Member::of_environment() {
  static const std::unique_ptr<Member> member = []() -> std::unique_ptr<Member> {
    const char* text = std::getenv(kMembershipVariable);
    if (!text) return nullptr;
    int fd = -1, slot = -1;
    if (std::sscanf(text, "%d:%d", &fd, &slot) != 2) {
      throw InvalidArgument(
          fmt::format("{}: expected to be set by tandem launch only", kMembershipVariable));
    }
    return std::unique_ptr<Member>(new Member(fd, slot));
  }();
  return member.get();
}

std::string Member::describe(const Board& board, int slot) {
  return fmt::format("{}:{}", board.fd(), slot);
}

bool Member::is_outdated() const {
  return board_.head().generation != joined_ || board_.head().closed == kClosedByLoss;
}

Member::Joined Member::join(Clock::time_point until) {
  BoardHead& head = board_.head();
  while (true) {
    const uint32_t changes = head.changes, generation = head.generation;
    const int rank = board_.slot(slot_).rank, size = head.size;
    const bool resumes = head.resumes != 0;
    if (generation != joined_ && rank >= 0 && head.generation == generation) {
      const auto [local_rank, local_size] = board_.local_rank(slot_);
      setenv("RANK", std::to_string(rank).c_str(), 1);
      setenv("LOCAL_RANK", std::to_string(local_rank).c_str(), 1);
      setenv("WORLD_SIZE", std::to_string(size).c_str(), 1);
      setenv("LOCAL_WORLD_SIZE", std::to_string(local_size).c_str(), 1);
      if (head.port != 0) setenv("MASTER_PORT", std::to_string(head.port).c_str(), 1);
      setenv("TORCHELASTIC_RUN_ID", board_.run_id(generation).c_str(), 1);
      MemberSlot& member = board_.slot(slot_);
      // The ranks of one process are threads, whose waits are not in its words.
      if (size > 1) progress_words = &member.words;
      if (size == 1) member.words.activity = RankActivity::file;
      joined_ = generation;
      resumes_ = resumes;
      return Joined::yes;
    }
    if (head.closed) return Joined::ended;
    const auto left = generation == joined_ ? until - Clock::now() : Clock::duration::max();
    if (left <= Clock::duration::zero()) return Joined::late;
    // No longer than this: the launcher may die without a word.
    const auto nap = std::min<Clock::duration>(left, std::chrono::seconds(1));
    const timespec timeout{time_t(nap / std::chrono::seconds(1)),
                           long((nap % std::chrono::seconds(1)).count())};
    syscall(SYS_futex, &head.changes, FUTEX_WAIT, changes, &timeout, nullptr, 0);
  }
}

void Member::note_layout(int tp, int dp, int pp, int ep) const {
  BoardHead& head = board_.head();
  if (head.tp != 0) return;
  head.dp = dp;
  head.pp = pp;
  head.ep = ep;
  head.tp = tp;
}

void Member::leave(ProcessFault fault) const {
  board_.slot(slot_).fault = fault;
  std::this_thread::sleep_for(std::chrono::seconds(10));
}

void Member::note_step(int64_t step) const {
  MemberSlot& slot = board_.slot(slot_);
  begin_activity(RankActivity::work, "step", Clock::now());
  slot.step.store(step, std::memory_order_relaxed);
  if (slot.training.load(std::memory_order_relaxed) == joined_) return;
  slot.first_step.store(step, std::memory_order_relaxed);
  // Times from the start or from another layout say nothing about the next steps.
  slot.words.longest_work_ns = 0;
  work_history.of_ended_scopes.clear();
  const auto now = Clock::now().time_since_epoch();
  slot.first_step_ns.store(std::chrono::nanoseconds(now).count(), std::memory_order_relaxed);
  slot.training.store(joined_, std::memory_order_release);
}

}  // namespace tandem::control
