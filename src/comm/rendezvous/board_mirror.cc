#include "comm/rendezvous/board_mirror.h"

#include <chrono>
#include <cstring>

#include "tandem/error.h"

namespace tandem::control {
namespace {

struct HeadDecisions {
  uint32_t generation, closed, has_output, resumes;
  int32_t size, tp, dp, pp, ep, min_dp, port;
  int32_t zero = 0;  ///< decisions are compared as bytes: no padding
  double rank_flops;
};
static_assert(sizeof(HeadDecisions) == 12 * 4 + sizeof(double));

struct SlotDecisions {
  int32_t rank, host;
  int64_t longest_work_ns;  ///< of a process of another host
};

struct HeadProgress {
  uint32_t has_output;
  int32_t tp, dp, pp, ep;
  double rank_flops;
};

struct SlotProgress {
  int32_t slot, peer;
  uint32_t training, done;
  ProcessFault fault;
  int64_t step, first_step, first_step_age, since_age, longest_work_ns;
  RankActivity activity;
  uint64_t name[2];
};

int64_t steady_ns() {
  return std::chrono::nanoseconds(Member::Clock::now().time_since_epoch()).count();
}

template <typename T>
void append_struct(std::vector<std::byte>& to, const T& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  to.insert(to.end(), bytes.begin(), bytes.end());
}

template <typename T>
T take_struct(std::span<const std::byte>& from) {
  T value;
  if (from.size() < sizeof value) throw IoError("membership board: a message is cut off");
  std::memcpy(&value, from.data(), sizeof value);
  from = from.subspan(sizeof value);
  return value;
}

/// Sets the facts of the run that `from` knows; `sizes`: those of its layout, too.
template <typename From>
void apply_layout(BoardHead& head, const From& from, bool sizes) {
  if (sizes) {
    head.dp = from.dp;
    head.pp = from.pp;
    head.ep = from.ep;
    head.tp = from.tp;
  }
  if (from.rank_flops != 0) head.rank_flops = from.rank_flops;
  if (from.has_output != 0) head.has_output = 1;
}

}  // namespace

std::vector<std::byte> read_decisions(const Board& board) {
  const BoardHead& head = board.head();
  std::vector<std::byte> bytes;
  append_struct(bytes, HeadDecisions{head.generation, head.closed, head.has_output, head.resumes,
                                     head.size, head.tp, head.dp, head.pp, head.ep, head.min_dp,
                                     head.port, 0, head.rank_flops});
  for (int i = 0; i < head.slots; ++i) {
    const MemberSlot& slot = board.slot(i);
    append_struct(bytes, SlotDecisions{slot.rank, slot.host, slot.words.longest_work_ns});
  }
  return bytes;
}

void apply_decisions(Board& board, int host, std::span<const std::byte> bytes) {
  const auto decisions = take_struct<HeadDecisions>(bytes);
  BoardHead& head = board.head();
  if (bytes.size() != size_t(head.slots) * sizeof(SlotDecisions)) {
    throw IoError("membership board: a message is of another size");
  }
  for (int i = 0; i < head.slots; ++i) {
    const auto decided = take_struct<SlotDecisions>(bytes);
    MemberSlot& slot = board.slot(i);
    slot.rank = decided.rank;
    slot.host = decided.host;
    if (decided.host != host) slot.words.longest_work_ns = decided.longest_work_ns;
  }
  apply_layout(head, decisions, decisions.tp != 0);
  head.size = decisions.size;
  head.resumes = decisions.resumes;
  head.min_dp = decisions.min_dp;
  head.port = decisions.port;
  head.closed = decisions.closed;
  head.generation = decisions.generation;
  board.notify_change();
}

std::vector<std::byte> read_progress(const Board& board, std::span<const int> slots) {
  const BoardHead& head = board.head();
  const int64_t now = steady_ns();
  std::vector<std::byte> bytes;
  append_struct(bytes,
                HeadProgress{head.has_output, head.tp, head.dp, head.pp, head.ep, head.rank_flops});
  for (const int i : slots) {
    const MemberSlot& slot = board.slot(i);
    const uint32_t training = slot.training.load(std::memory_order_acquire);
    append_struct(bytes, SlotProgress{i,
                                      slot.words.peer,
                                      training,
                                      slot.done,
                                      slot.fault,
                                      slot.step,
                                      slot.first_step,
                                      now - slot.first_step_ns,
                                      now - slot.words.since_ns,
                                      slot.words.longest_work_ns,
                                      slot.words.activity,
                                      {slot.words.name[0], slot.words.name[1]}});
  }
  return bytes;
}

void apply_progress(Board& board, std::span<const std::byte> bytes) {
  const int64_t now = steady_ns();
  const auto progress = take_struct<HeadProgress>(bytes);
  BoardHead& head = board.head();
  apply_layout(head, progress, head.tp == 0 && progress.tp != 0);
  while (!bytes.empty()) {
    const auto said = take_struct<SlotProgress>(bytes);
    if (said.slot < 0 || said.slot >= head.slots) {
      throw IoError("membership board: a message names another slot");
    }
    MemberSlot& slot = board.slot(said.slot);
    slot.words.since_ns = now - said.since_age;
    slot.words.longest_work_ns = said.longest_work_ns;
    slot.words.activity = said.activity;
    slot.words.peer = said.peer;
    slot.words.name[0] = said.name[0];
    slot.words.name[1] = said.name[1];
    slot.done = said.done;
    slot.fault = said.fault;
    slot.step = said.step;
    slot.first_step = said.first_step;
    slot.first_step_ns = now - said.first_step_age;
    slot.training.store(said.training, std::memory_order_release);
  }
}

}  // namespace tandem::control
