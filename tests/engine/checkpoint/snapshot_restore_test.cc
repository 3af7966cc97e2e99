// Runs that end at any moment and resume from snapshots in memory that outlived them: the bits are
// those of an undisturbed run, whatever happened to the memory.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/processes/shared/snapshot_memory_file.h"
#include "core/system/files.h"
#include "engine/checkpoint/snapshot/snapshot_area.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/run_results.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kSteps = 8;

/// Held as a launcher does, before the environment is read.
const int kLaunchersMemory = [] {
  const int fd = processes::create_snapshot_memory();
  ::setenv(processes::kSnapshotMemoryVariable, std::to_string(fd).c_str(), 1);
  return fd;
}();

/// As if the rank's host were lost.
void erase_memory(int rank) {
  ASSERT_EQ(::fallocate(kLaunchersMemory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                        off_t(processes::kSnapshotRange) * rank, off_t(processes::kSnapshotRange)),
            0);
}

void erase_all_memory() {
  for (int rank = 0; rank < 16; ++rank) erase_memory(rank);
}

SnapshotArea area_of(int rank, bool is_peers = false) {
  return {kLaunchersMemory,
          processes::kSnapshotRange * uint64_t(rank) + (is_peers ? kAreaRange : uint64_t{0})};
}

struct RestoreCase {
  std::string name;
  Layout layout;
  std::vector<std::string> overrides;
  std::string config = "tiny.toml";
};

std::ostream& operator<<(std::ostream& out, const RestoreCase& c) {
  return out << c.name;
}

const std::vector<std::string> kSmallRun{"train.steps=8",
                                         "train.batch=8",
                                         "train.seq=16",
                                         "model.layers=2",
                                         "model.ffn=32",
                                         "train.microbatch=1",
                                         "parallel.dp_bucket_mib=0.05",
                                         "checkpoint.snapshot_every=1",
                                         "checkpoint.every=4"};

TrainRequest request(const RestoreCase& c, const std::string& out,
                     const std::vector<std::string>& overrides = {}) {
  std::vector<std::string> all = kSmallRun;
  all.insert(all.end(), c.overrides.begin(), c.overrides.end());
  all.insert(all.end(), overrides.begin(), overrides.end());
  TrainRequest request = request_for(c.layout, out, all, c.config);
  request.resume = true;
  return request;
}

/// Calls `run` with a log, which it returns.
std::string with_log(TrainRequest request, const std::function<void(const TrainRequest&)>& run) {
  const TempDir dir;
  const std::string path = dir / "log";
  request.log = std::fopen(path.c_str(), "w");
  run(request);
  std::fclose(request.log);
  return read_file(path);
}

/// Returns the log.
std::string run_to_end(const TrainRequest& request) {
  return with_log(
      request, [](const TrainRequest& logged) { EXPECT_EQ(run_on_threads(logged).step, kSteps); });
}

/// Runs until one of the ranks fails at `step`, once `is_ready`; the others end at any moment of
/// it.
void run_until(
    TrainRequest request, int64_t step,
    const std::function<bool()>& is_ready = [] { return true; }) {
  std::atomic<bool> has_failed = false;
  request.before_step = [&](int64_t finished) {
    if (finished != step || has_failed.exchange(true)) return;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(50);
    while (!is_ready() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw Error("this rank is lost");
  };
  with_log(request,
           [](const TrainRequest& logged) { EXPECT_THROW(run_on_threads(logged), Error); });
}

/// Step in "resuming from step 5 in the ranks' memory"; -1 if the log has none.
int64_t restored_step(const std::string& log) {
  const size_t end = log.find(" in the ranks' memory");
  if (end == log.npos) return -1;
  const size_t begin = log.rfind("resuming from step ", end);
  return begin == log.npos ? -1 : std::stoll(log.substr(begin + 19));
}

class SnapshotRestore : public testing::TestWithParam<RestoreCase> {};

TEST_P(SnapshotRestore, ResumedRunHasTheBitsOfAnUndisturbedOne) {
  const TempDir dir;
  erase_all_memory();
  run_to_end(request(GetParam(), dir / "whole"));
  const std::string expected = final_weights(dir / "whole");
  for (const int64_t step : {2, 6}) {
    const std::string out = dir / fmt::format("run{}", step);
    run_until(request(GetParam(), out), step);
    const std::string log = run_to_end(request(GetParam(), out));
    EXPECT_GE(restored_step(log), step - 1) << log;
    EXPECT_LE(restored_step(log), step) << log;
    EXPECT_TRUE(final_weights(out) == expected) << log;
    EXPECT_EQ(losses(out).size(), size_t(kSteps));
  }
}

std::vector<RestoreCase> restore_cases() {
  return {{"tp2_dp2", {2, 2}, {}},
          {"bf16_dp2_peers", {1, 2}, {"train.dtype=bf16", "checkpoint.peer_copy=true"}},
          {"cp2_peers", {1, 1}, {"parallel.cp=2", "checkpoint.peer_copy=true"}},
          {"pp2_dp2", {1, 2}, {"parallel.pp=2"}},
          {"residuals_and_masters", {1, 2}, {"parallel.codec=gradients=int4:g32,weights=int8"}},
          {"replicated_state", {1, 2}, {"parallel.zero=0"}},
          {"experts", {1, 4}, {"parallel.ep=2"}, "moe.toml"},
          {"learners",
           {1, 4},
           {"sync.method=local", "sync.learners=2", "sync.every=4", "sync.fragments=2",
            "sync.delay=1"}}};
}

std::vector<RestoreCase> more_restore_cases() {
  return {{"one_rank", {1, 1}, {}},
          {"zero2", {1, 2}, {"parallel.zero=2"}},
          {"shared_shards", {1, 4}, {"parallel.dp_shard=2"}},
          {"bf16_tp2_dp2_peers", {2, 2}, {"train.dtype=bf16", "checkpoint.peer_copy=true"}},
          {"interleaved",
           {1, 2},
           {"parallel.pp=2", "parallel.virtual_stages=2", "parallel.schedule=interleaved",
            "model.layers=4"}},
          {"tied", {1, 2}, {"parallel.pp=2", "model.tie_word_embeddings=true"}},
          {"logical_replicas", {1, 2}, {"parallel.replicas=4"}},
          {"lamb", {2, 2}, {"optimizer.name=lamb"}},
          {"experts_tp2_bf16",
           {2, 2},
           {"parallel.ep=2", "train.dtype=bf16", "checkpoint.peer_copy=true"},
           "moe.toml"},
          {"expert_residuals",
           {1, 4},
           {"parallel.ep=2", "parallel.codec=gradients=int4:g32,weights=int8"},
           "moe.toml"}};
}

INSTANTIATE_TEST_SUITE_P(Some, SnapshotRestore, testing::ValuesIn(restore_cases()),
                         [](const auto& of) { return of.param.name; });
INSTANTIATE_TEST_SUITE_P(MoreLong, SnapshotRestore, testing::ValuesIn(more_restore_cases()),
                         [](const auto& of) { return of.param.name; });

const RestoreCase kPeers{"peers", {1, 2}, {"checkpoint.peer_copy=true"}};

/// Whether both ranks have a copy of the other one's snapshots: a thread of low priority makes it,
/// and steps do not wait for that.
bool have_copies() {
  for (const int rank : {0, 1}) {
    const SnapshotArea area = area_of(rank, true);
    if (!area.has_owner() || !(area.header(0).is_valid() || area.header(1).is_valid())) {
      return false;
    }
  }
  return true;
}

TEST(MemoryOfRanks, LostRankIsRestoredFromItsPeer) {
  const TempDir dir;
  erase_all_memory();
  run_to_end(request(kPeers, dir / "whole"));
  // Without checkpoints, of which one may be newer than the last copy.
  const std::vector<std::string> rarely{"checkpoint.every=1000"};
  for (const int lost : {0, 1}) {
    const std::string out = dir / fmt::format("run{}", lost);
    run_until(request(kPeers, out, rarely), 6, have_copies);
    erase_memory(lost);
    const std::string log = run_to_end(request(kPeers, out, rarely));
    EXPECT_THAT(log,
                HasSubstr(fmt::format("(of rank {} from its copy on rank {})", lost, 1 - lost)));
    EXPECT_GE(restored_step(log), 1);
    EXPECT_TRUE(final_weights(out) == final_weights(dir / "whole")) << log;
  }
}

TEST(MemoryOfRanks, WithoutARanksSnapshotTheDiskIsUsed) {
  const TempDir dir;
  erase_all_memory();
  const RestoreCase c{"", {1, 2}, {}};
  run_to_end(request(c, dir / "whole"));
  run_until(request(c, dir / "run"), 7);
  erase_memory(1);
  const std::string log = run_to_end(request(c, dir / "run"));
  EXPECT_THAT(log, HasSubstr("there is no step of which every rank, or its peer, has one"));
  EXPECT_EQ(restored_step(log), -1) << log;
  EXPECT_TRUE(final_weights(dir / "run") == final_weights(dir / "whole"));
}

TEST(MemoryOfRanks, NewerCheckpointIsPreferred) {
  const TempDir dir;
  erase_all_memory();
  const RestoreCase c{"", {1, 2}, {}};
  run_to_end(request(c, dir / "run"));
  const std::string expected = final_weights(dir / "run");
  fs::remove_all(dir / "run/final");
  const SnapshotArea area = area_of(1);
  for (int index = 0; index < 3; ++index) {
    SnapshotHeader& header = area.header(index);
    if (header.step > 6) header.invalidate();
  }
  const std::string log = run_to_end(request(c, dir / "run"));
  EXPECT_THAT(log, HasSubstr("resuming from " + dir / "run/checkpoints/step-00000008")) << log;
  EXPECT_TRUE(final_weights(dir / "run") == expected);
}

TEST(MemoryOfRanks, AnotherLayoutsAndAnotherRunsAreRefusedByName) {
  const TempDir dir;
  erase_all_memory();
  const RestoreCase two{"", {1, 2}, {}}, other{"", {2, 1}, {}};
  run_to_end(request(two, dir / "whole"));
  run_until(request(two, dir / "run"), 7);
  std::string log = run_to_end(request(two, dir / "second"));
  EXPECT_THAT(log, HasSubstr("snapshots in memory are not used: they are of run "));
  EXPECT_TRUE(final_weights(dir / "second") == final_weights(dir / "whole"));

  run_until(request(two, dir / "third"), 7);
  log = run_to_end(request(other, dir / "third"));
  EXPECT_THAT(log, HasSubstr("snapshots in memory are not used: they are of tp 1 dp 2"));
  EXPECT_THAT(log, HasSubstr("expected tp 2 dp 1"));
  EXPECT_EQ(restored_step(log), -1) << log;
}

/// A byte anywhere in the memory of any rank changes between death and resume.
void damage_memory(uint64_t begin, uint64_t end) {
  const TempDir dir;
  erase_all_memory();
  run_to_end(request(kPeers, dir / "whole"));
  const std::string expected = final_weights(dir / "whole");
  int noticed = 0;
  for (uint64_t i = begin; i < end; ++i) {
    const std::string out = dir / fmt::format("run{}", i);
    const auto words = philox(12, 9, i);
    run_until(request(kPeers, out), 2 + int64_t(words[0] % 6));
    for (int rank = 0; rank < 2; ++rank) {
      if (i % 4 == 3) {
        erase_memory(rank == 0 ? 0 : 2);  // also a rank's memory is lost
      }
      // The first page, or headers and values of a generation.
      SnapshotArea area = area_of(rank, i % 4 == 2);
      if (!area.has_owner()) continue;
      const size_t bytes = area.shape().generation_bytes();
      const size_t at = i % 5 == 0 ? words[1] % 200 : words[1] % bytes;
      const int damaged = int(words[2] % uint32_t(area.shape().generations));
      for (int g = 0; g < area.shape().generations; ++g) {
        // In some runs values of all of them, so that the newest is found damaged.
        if (i % 5 == 1) area.generation(g)[bytes / 2] ^= std::byte{1};
        if (i % 5 != 1 && g == damaged) area.generation(g)[at] ^= std::byte(1 << words[3] % 8);
      }
    }
    const std::string log = run_to_end(request(kPeers, out));
    noticed += log.find("not restored") != log.npos;
    EXPECT_TRUE(final_weights(out) == expected) << i << "\n" << log;
    fs::remove_all(out);
  }
  EXPECT_GT(noticed, int(end - begin) / 10);
}

TEST(MemoryOfRanks, DamagedSnapshotsAreNeverUsed) {
  damage_memory(0, 8);
}

TEST(MemoryOfRanksLong, DamagedSnapshotsAreNeverUsed) {
  damage_memory(8, 300);
}

}  // namespace
}  // namespace tandem
