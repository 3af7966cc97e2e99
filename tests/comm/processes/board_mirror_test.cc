// Decisions and progress that boards of two hosts exchange.
#include "comm/rendezvous/board_mirror.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tandem/error.h"

namespace tandem::control {
namespace {

constexpr int kSlots = 4;

void decide(Board& board) {
  BoardHead& head = board.head();
  head.size = 3;
  head.tp = 1;
  head.dp = 3;
  head.pp = 1;
  head.ep = 1;
  head.min_dp = 2;
  head.port = 4711;
  head.resumes = 1;
  head.has_output = 1;
  head.rank_flops = 2.5e9;
  head.closed = kClosedByLoss;
  head.generation = 7;
  const int ranks[kSlots] = {2, kSpare, 0, 1}, hosts[kSlots] = {0, 0, 1, 1};
  for (int i = 0; i < kSlots; ++i) {
    board.slot(i).rank = ranks[i];
    board.slot(i).host = hosts[i];
    board.slot(i).words.longest_work_ns = 100 + i;
  }
}

TEST(BoardMirror, DecisionsReachTheBoardOfAHost) {
  Board launcher(kSlots, "run"), executor(kSlots, "run");
  decide(launcher);
  for (int i = 0; i < kSlots; ++i) executor.slot(i).words.longest_work_ns = 1;
  const uint32_t changes = executor.head().changes;
  apply_decisions(executor, 1, read_decisions(launcher));
  const BoardHead &from = launcher.head(), &to = executor.head();
  EXPECT_EQ(to.generation, from.generation);
  EXPECT_EQ(to.closed, from.closed);
  EXPECT_EQ(to.size, from.size);
  EXPECT_EQ(to.tp, from.tp);
  EXPECT_EQ(to.dp, from.dp);
  EXPECT_EQ(to.pp, from.pp);
  EXPECT_EQ(to.ep, from.ep);
  EXPECT_EQ(to.min_dp, from.min_dp);
  EXPECT_EQ(to.port, from.port);
  EXPECT_EQ(to.resumes, from.resumes);
  EXPECT_EQ(to.has_output, from.has_output);
  EXPECT_EQ(to.rank_flops, from.rank_flops);
  EXPECT_NE(to.changes, changes) << "processes that wait are not woken";
  for (int i = 0; i < kSlots; ++i) {
    EXPECT_EQ(executor.slot(i).rank, launcher.slot(i).rank) << i;
    EXPECT_EQ(executor.slot(i).host, launcher.slot(i).host) << i;
    // The words of this host's processes are newer here.
    EXPECT_EQ(executor.slot(i).words.longest_work_ns, i < 2 ? 100 + i : 1) << i;
  }
}

TEST(BoardMirror, DecisionsDoNotEraseWhatOnlyTheHostKnows) {
  Board launcher(1, "run"), executor(1, "run");
  executor.head().tp = 2;
  executor.head().dp = 3;
  executor.head().rank_flops = 1e9;
  executor.head().has_output = 1;
  apply_decisions(executor, 0, read_decisions(launcher));
  EXPECT_EQ(executor.head().tp, 2);
  EXPECT_EQ(executor.head().dp, 3);
  EXPECT_EQ(executor.head().rank_flops, 1e9);
  EXPECT_EQ(executor.head().has_output, 1u);
}

TEST(BoardMirror, ProgressReachesTheLauncherForTheNamedSlotsOnly) {
  Board executor(kSlots, "run"), launcher(kSlots, "run");
  executor.head().tp = 2;
  executor.head().dp = 1;
  executor.head().has_output = 1;
  for (int i = 0; i < kSlots; ++i) {
    MemberSlot& slot = executor.slot(i);
    slot.training = uint32_t(3 + i);
    slot.done = 1;
    slot.fault = ProcessFault(i % 2);
    slot.step = 10 + i;
    slot.first_step = 5 + i;
    slot.words.peer = i;
    slot.words.longest_work_ns = 1000 + i;
    slot.words.name[0] = uint64_t(77 + i);
    launcher.slot(i).step = -1;
  }
  const std::vector<int> slots{1, 3};
  apply_progress(launcher, read_progress(executor, slots));
  EXPECT_EQ(launcher.head().tp, 2);
  EXPECT_EQ(launcher.head().dp, 1);
  EXPECT_EQ(launcher.head().has_output, 1u);
  for (int i = 0; i < kSlots; ++i) {
    const MemberSlot &from = executor.slot(i), &to = launcher.slot(i);
    if (i % 2 == 0) {
      EXPECT_EQ(to.step, -1) << i;
      EXPECT_EQ(to.done, 0u) << i;
      continue;
    }
    EXPECT_EQ(to.training, from.training) << i;
    EXPECT_EQ(to.done, from.done) << i;
    EXPECT_EQ(to.fault, from.fault) << i;
    EXPECT_EQ(to.step, from.step) << i;
    EXPECT_EQ(to.first_step, from.first_step) << i;
    EXPECT_EQ(to.words.peer, from.words.peer) << i;
    EXPECT_EQ(to.words.longest_work_ns, from.words.longest_work_ns) << i;
    EXPECT_EQ(to.words.name[0], from.words.name[0]) << i;
    // Clocks of hosts differ: the age travels, and grows on the way.
    EXPECT_GE(to.first_step_ns, from.first_step_ns) << i;
    EXPECT_GE(to.words.since_ns, from.words.since_ns) << i;
  }
}

TEST(BoardMirror, MessagesOfAnotherSizeOrSlotAreRefused) {
  Board board(kSlots, "run"), larger(kSlots + 1, "run");
  const auto decisions = read_decisions(board);
  for (size_t bytes = 0; bytes < decisions.size(); ++bytes) {
    EXPECT_THROW(apply_decisions(board, 0, std::span(decisions).first(bytes)), IoError) << bytes;
  }
  EXPECT_THROW(apply_decisions(board, 0, read_decisions(larger)), IoError);
  EXPECT_EQ(board.head().generation, 0u);
  const std::vector<int> last{kSlots};
  const auto progress = read_progress(larger, last);
  EXPECT_THROW(apply_progress(board, progress), IoError);
  EXPECT_THROW(apply_progress(larger, std::span(progress).first(progress.size() - 1)), IoError);
  EXPECT_NO_THROW(apply_progress(larger, progress));
}

}  // namespace
}  // namespace tandem::control
