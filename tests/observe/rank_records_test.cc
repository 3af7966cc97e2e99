// Records of ranks: files, alignment, ranks that are slow for a while, and what the doctor says.
#include "observe/rank_records.h"
#include "observe/recorder.h"
#include "observe/slowdown.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "core/system/files.h"
#include "engine/report/diagnosis.h"
#include "engine/report/ranks/rank_map.h"
#include "engine/report/ranks/rank_rows.h"
#include "engine/report/ranks/slow_watch.h"
#include "overlap/contract/receipt.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using report::align;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

PhaseTimes all_phases(double ms) {
  PhaseTimes phases;
  phases.fill(ms);
  return phases;
}

void write_steps(const std::string& folder, const RankPosition& position, int64_t begin,
                 int64_t end, double step_ms, double phase_ms) {
  RankRecords records(folder, position, begin);
  for (int64_t step = begin + 1; step <= end; ++step) {
    records.add(step, step_ms, all_phases(phase_ms));
  }
}

TEST(RankRecords, TimesHaveElevenBits) {
  const TempDir dir;
  const double times[] = {0, .001, .5, 2.047, 2.048, 3.3333, 85.123, 4321, 1e6, 3.9e9};
  {
    RankRecords records(
        dir / "ranks", {.rank = 3, .ranks = 4, .tp = 1, .dp = 2, .pp = 0, .host = "a", .cp = 0}, 7);
    int64_t step = 7;
    for (const double ms : times) records.add(++step, 1000, all_phases(ms));
  }
  const auto histories = read_rank_records(dir / "ranks");
  ASSERT_EQ(histories.size(), 1u);
  EXPECT_EQ(histories[0].position, (RankPosition{3, 4, 1, 2, 0, false, "a", 0}));
  EXPECT_EQ(describe(histories[0].position), "tp 1, cp 0, dp 2, pp 0, host a");
  ASSERT_EQ(histories[0].frames.size(), std::size(times));
  for (size_t i = 0; i < std::size(times); ++i) {
    EXPECT_EQ(histories[0].frames[i].step, int64_t(8 + i));
    for (const double ms : histories[0].frames[i].phases) {
      EXPECT_NEAR(ms, times[i], std::max(.0005, times[i] / 4000)) << times[i];
    }
  }
}

TEST(RankRecords, AreNotWrittenThroughALink) {
  const TempDir dir;
  std::filesystem::create_directories(dir / "other");
  std::filesystem::create_symlink("other", dir / "ranks");
  EXPECT_THROW(RankRecords(dir / "ranks", {}, 0), IoError);
  EXPECT_TRUE(names_in(dir / "other").empty());
}

TEST(RankRecords, ShortStepsShareFramesOfAPowerOfTwo) {
  const TempDir dir;
  write_steps(dir / "ranks", {}, 0, 1000, 3, 1);
  const auto histories = read_rank_records(dir / "ranks");
  int64_t steps = 0;
  for (const RankFrame& frame : histories.at(0).frames) {
    steps += frame.steps;
    EXPECT_NEAR(frame.step_ms, 3, .002);
    EXPECT_TRUE(frame.steps == 1 || frame.step == 1000 || frame.step % 32 == 0) << frame.step;
  }
  EXPECT_EQ(steps, 1000);
  EXPECT_LT(histories[0].frames.size(), 40u);
  // An hour has at most 45,000 frames.
  constexpr size_t kHeader = 112;
  const size_t frames = read_file(dir / "ranks/0.from-0.records").size() - kHeader;
  EXPECT_LT(45000 * frames / histories[0].frames.size(), 1600000u);
}

TEST(RankRecords, AResumedRunReplacesTheStepsItMakesAgain) {
  const TempDir dir;
  for (int rank = 0; rank < 4; ++rank) {
    write_steps(dir / "ranks", {.rank = rank, .ranks = 4}, 0, 50, 100, 1);
  }
  for (int rank = 0; rank < 3; ++rank) {
    write_steps(dir / "ranks", {.rank = rank, .ranks = 3}, 40, 60, 100, 2);
  }
  const auto histories = read_rank_records(dir / "ranks");
  ASSERT_EQ(histories.size(), 3u);  // rank 3 has no part in the last start
  for (const RankHistory& history : histories) {
    ASSERT_EQ(history.frames.size(), 60u);
    for (const RankFrame& frame : history.frames) {
      EXPECT_NEAR(frame.phases[0], frame.step <= 40 ? 1 : 2, 1e-9) << frame.step;
    }
  }
}

TEST(RankRecords, FewerRanksMayStartFromTheSameStep) {
  const TempDir dir;
  for (int rank = 0; rank < 4; ++rank) {
    write_steps(dir / "ranks", {.rank = rank, .ranks = 4}, 0, 5, 100, 1);
  }
  for (int rank = 0; rank < 2; ++rank) {
    write_steps(dir / "ranks", {.rank = rank, .ranks = 2}, 0, 7, 100, 2);
  }
  const auto histories = read_rank_records(dir / "ranks");
  ASSERT_EQ(histories.size(), 2u);
  EXPECT_EQ(histories[1].frames.size(), 7u);
}

TEST(RankRecords, AnIncompleteLastFrameIsIgnored) {
  const TempDir dir;
  write_steps(dir / "ranks", {}, 0, 10, 100, 1);
  const std::string path = dir / "ranks/0.from-0.records", bytes = read_file(path);
  for (size_t cut = 1; cut < 34; cut += 7) {
    write_file(path, bytes.substr(0, bytes.size() - cut));
    EXPECT_EQ(read_rank_records(dir / "ranks").at(0).frames.size(), 9u);
  }
}

// Files written before waits for learners, or for context-parallel ranks, were a phase have frames
// of 30 and 32 bytes.
TEST(RankRecords, FilesWithoutTheLastPhasesAreRead) {
  const TempDir dir;
  write_steps(dir / "ranks", {}, 0, 10, 100, 1);
  const auto expected = read_rank_records(dir / "ranks").at(0).frames;
  const std::string path = dir / "ranks/0.from-0.records", bytes = read_file(path);
  for (const auto& [magic, frame_bytes] :
       {std::pair("tdmrank1", size_t{30}), std::pair("tdmrank2", size_t{32})}) {
    std::string former = magic + bytes.substr(8, 104);
    for (size_t at = 112; at < bytes.size(); at += 34) former += bytes.substr(at, frame_bytes);
    write_file(path, former);
    const RankHistory read = read_rank_records(dir / "ranks").at(0);
    EXPECT_EQ(describe(read.position), "tp 0, dp 0, pp 0, host ");
    const auto& frames = read.frames;
    ASSERT_EQ(frames.size(), expected.size());
    for (size_t i = 0; i < frames.size(); ++i) {
      EXPECT_EQ(frames[i].step, expected[i].step);
      EXPECT_EQ(frames[i].phases[size_t(Phase::forward)],
                expected[i].phases[size_t(Phase::forward)]);
      EXPECT_EQ(frames[i].phases[size_t(Phase::cp_wait)], 0);
      if (frame_bytes == 30) {
        EXPECT_EQ(frames[i].phases[size_t(Phase::sync_wait)], 0);
      }
    }
  }
}

TEST(RankRecords, DamagedFilesAreNamed) {
  const TempDir dir;
  write_steps(dir / "ranks", {}, 0, 10, 100, 1);
  const std::string path = dir / "ranks/0.from-0.records", bytes = read_file(path);
  const auto expect_refused = [&](const std::string& text) {
    write_file(path, text);
    try {
      read_rank_records(dir / "ranks");
      ADD_FAILURE() << "accepted";
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), HasSubstr("0.from-0.records"));
    }
  };
  expect_refused("");
  expect_refused(bytes.substr(0, 50));
  expect_refused("x" + bytes.substr(1));
  std::string repeated = bytes;  // a frame twice
  repeated += bytes.substr(bytes.size() - 34);
  expect_refused(repeated);
  EXPECT_TRUE(read_rank_records(dir / "none").empty());
}

TEST(RankRows, EndWhereFramesOfAllRanksEnd) {
  RankHistory fine, coarse;
  for (int64_t step = 1; step <= 16; ++step) fine.frames.push_back({step, 1, double(step), {}});
  for (int64_t step = 4; step <= 12; step += 4) coarse.frames.push_back({step, 4, 7, {}});
  const std::vector<const RankHistory*> both{&fine, &coarse};
  const auto rows = align(both, 100);
  ASSERT_EQ(rows.size(), 3u);  // coarse has no frame that ends with step 16
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].first, int64_t(4 * i + 1));
    EXPECT_EQ(rows[i].last, int64_t(4 * i + 4));
    EXPECT_NEAR(rows[i].frames[0].step_ms, 4 * double(i) + 2.5, 1e-12);
    EXPECT_NEAR(rows[i].frames[1].step_ms, 7, 1e-12);
  }
  const auto merged = align(both, 1);
  ASSERT_EQ(merged.size(), 1u);
  EXPECT_NEAR(merged[0].frames[0].step_ms, 6.5, 1e-12);
}

/// Normal numbers, by Box and Muller.
class Noise {
 public:
  explicit Noise(uint64_t seed) : seed_(seed) {}
  double operator()() {
    const auto words = philox(91, seed_, next_++);
    const double u = (words[0] + 1.0) / 4294967297.0, v = words[1] / 4294967296.0;
    return std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * v);
  }

 private:
  uint64_t seed_, next_ = 0;
};

constexpr Phase kWork[] = {Phase::data, Phase::forward, Phase::backward, Phase::weight_gradients,
                           Phase::update};
constexpr double kUsual[] = {8, 25, 40, 15, 12};  // ms

struct Trial {
  int ranks, slow_rank;
  Phase phase;
  double excess;
  int64_t slow_from;
};

/// Steps of ranks whose times vary from step to step, by 3 % each and together by 5 %.
std::vector<RankHistory> histories_of(const Trial& trial, uint64_t seed, int64_t steps) {
  Noise noise(seed);
  std::vector<RankHistory> ranks(size_t(trial.ranks));
  for (int64_t step = 1; step <= steps; ++step) {
    const double together = std::exp(.05 * noise());
    double longest = 0;
    for (int rank = 0; rank < trial.ranks; ++rank) {
      RankFrame frame{step, 1, 0, {}};
      double local = 0;
      for (size_t i = 0; i < std::size(kWork); ++i) {
        double ms = kUsual[i] * together * std::exp(.03 * noise());
        const bool is_slow = rank == trial.slow_rank && kWork[i] == trial.phase;
        if (is_slow && step > trial.slow_from) ms *= 1 + trial.excess;
        frame.phases[size_t(kWork[i])] = ms;
        local += ms;
      }
      frame.phases[size_t(Phase::tp_wait)] = -local;  // completed below
      ranks[size_t(rank)].position = {.rank = rank, .ranks = trial.ranks, .dp = rank};
      ranks[size_t(rank)].frames.push_back(frame);
      longest = std::max(longest, local);
    }
    for (RankHistory& history : ranks) {
      history.frames.back().phases[size_t(Phase::tp_wait)] += longest;
      history.frames.back().step_ms = longest;
    }
  }
  return ranks;
}

TEST(Slowdown, LengthensComputationOfItsPhaseOnly) {
  recorder().reset();
  PhaseTimes shares{};
  shares[size_t(Phase::backward)] = .5;
  slow_down(shares);
  const auto add = [](SpanKind kind, Phase phase) {
    const ScopedPhase scope(phase);
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i) {
      recorder().add({kind, "work", begin, begin + std::chrono::microseconds(100)});
    }
  };
  add(SpanKind::compute, Phase::forward);
  add(SpanKind::gemm, Phase::backward);
  add(SpanKind::wait, Phase::tp_wait);
  slow_down({});
  const PhaseTimes times = recorder().phase_times();
  EXPECT_NEAR(times[size_t(Phase::forward)], 10, 1e-6);
  EXPECT_NEAR(times[size_t(Phase::tp_wait)], 10, 1e-6);
  EXPECT_GE(times[size_t(Phase::backward)], 15 - .3);  // what is owed for less than a sleep
  add(SpanKind::compute, Phase::forward);
  EXPECT_NEAR(recorder().phase_times()[size_t(Phase::forward)], 20, 1e-6);
}

void write_histories(const std::string& folder, const std::vector<RankHistory>& ranks) {
  for (const RankHistory& history : ranks) {
    RankRecords records(folder, history.position, 0);
    for (const RankFrame& frame : history.frames) {
      records.add(frame.step, frame.step_ms, frame.phases);
    }
  }
}

TEST(Doctor, NamesTheSlowRankAndWhatTheOthersWaitFor) {
  const TempDir dir;
  const Trial trial{
      .ranks = 4, .slow_rank = 2, .phase = Phase::backward, .excess = .3, .slow_from = 100};
  write_histories(dir / "ranks", histories_of(trial, 1, 300));
  const auto lines = report::diagnose(dir.path());
  ASSERT_EQ(lines.size(), 5u) << fmt::format("{}", fmt::join(lines, "\n"));
  EXPECT_THAT(lines[0], HasSubstr("300 steps up to step 300"));
  EXPECT_THAT(lines[1], HasSubstr("backward"));
  EXPECT_THAT(lines[2], HasSubstr("rank 2 (tp 0, dp 2, pp 0"));
  EXPECT_THAT(lines[2], HasSubstr("backward takes"));
  EXPECT_THAT(lines[3], HasSubstr(": backward +"));
  EXPECT_THAT(lines[4], HasSubstr("held back most by rank 2"));
}

/// Line about drift of a run of four ranks on two hosts in which `change` alters the frames of
/// ranks from step 200 on.
std::string drift_line(const std::function<void(int rank, RankFrame&, Noise&)>& change) {
  const TempDir dir;
  const Trial trial{
      .ranks = 4, .slow_rank = 0, .phase = Phase::forward, .excess = 0, .slow_from = 0};
  const std::vector<std::string> hosts{"a", "b"};
  auto ranks = histories_of(trial, 11, 400);
  Noise noise(12);
  for (RankHistory& history : ranks) {
    history.position.host = hosts[size_t(history.position.rank / 2)];
    for (RankFrame& frame : history.frames) {
      if (frame.step > 200) change(history.position.rank, frame, noise);
    }
  }
  write_histories(dir / "ranks", ranks);
  const auto lines = report::diagnose(dir.path());
  return lines[lines.size() - 2];
}

void lengthen_work(RankFrame& frame, double factor) {
  for (size_t i = 0; i < kPhases; ++i) {
    if (!is_work(Phase(i))) continue;
    frame.step_ms += (factor - 1) * frame.phases[i];
    frame.phases[i] *= factor;
  }
}

TEST(Doctor, ExplainsDrift) {
  const auto steady = drift_line([](int, RankFrame&, Noise&) {});
  EXPECT_THAT(steady, HasSubstr("steady: "));
  const auto clock = drift_line([](int, RankFrame& frame, Noise&) { lengthen_work(frame, 1.12); });
  EXPECT_THAT(clock, HasSubstr("MFU -1"));
  EXPECT_THAT(clock, HasSubstr("all work alike by +1"));
  EXPECT_THAT(clock, HasSubstr("as of a lower clock"));
  EXPECT_THAT(clock, Not(HasSubstr(" on ")));
  const auto shared = drift_line([](int rank, RankFrame& frame, Noise& noise) {
    if (rank >= 2) lengthen_work(frame, 1.4 + .2 * noise());
  });
  EXPECT_THAT(shared, HasSubstr("on host b, all work alike"));
  EXPECT_THAT(shared, HasSubstr("other programs share the processors"));
  const auto rank = drift_line([](int r, RankFrame& frame, Noise&) {
    if (r == 1) frame.phases[size_t(Phase::backward)] += 12;
    frame.step_ms += 12;
  });
  EXPECT_THAT(rank, HasSubstr("backward +1"));
  EXPECT_THAT(rank, EndsWith(" ms on rank 1"));
  const auto launches = drift_line([](int, RankFrame& frame, Noise&) { frame.step_ms += 9; });
  EXPECT_THAT(launches, HasSubstr("time in no phase +"));
  const auto links = drift_line([](int, RankFrame& frame, Noise&) {
    frame.phases[size_t(Phase::dp_wait)] += 9, frame.step_ms += 9;
  });
  EXPECT_THAT(links, HasSubstr("DP wait +9.00 ms, and no rank's work: links"));
  const auto skew = drift_line([](int, RankFrame& frame, Noise&) {
    frame.phases[size_t(Phase::step_wait)] += 9, frame.step_ms += 9;
  });
  EXPECT_THAT(skew,
              HasSubstr("step wait +9.00 ms, and no rank's work: ranks start their work apart"));
}

/// Ranks reported as slow in each of the checks of records that grow by `step` steps.
std::vector<std::vector<std::string>> watch_slow(const Trial& trial, int64_t steps, int64_t step) {
  const TempDir dir;
  const auto histories = histories_of(trial, 3, steps);
  report::SlowWatch watch(dir / "ranks");
  EXPECT_TRUE(watch.check().empty());  // no folder yet
  std::vector<std::vector<std::string>> found;
  for (int64_t until = step; until <= steps; until += step) {
    auto grown = histories;
    for (RankHistory& history : grown) {
      std::erase_if(history.frames, [&](const RankFrame& frame) { return frame.step > until; });
    }
    write_histories(dir / "ranks", grown);
    auto& names = found.emplace_back();
    for (const report::SlowRank& slow : watch.check()) {
      names.push_back(fmt::format("{} {} {}", slow.straggler.rank, slow.position.rank,
                                  name_of(slow.straggler.phase)));
    }
  }
  return found;
}

TEST(SlowWatch, NamesARankOnceAfterItWasSlowInThreeChecks) {
  const Trial trial{
      .ranks = 4, .slow_rank = 2, .phase = Phase::backward, .excess = .3, .slow_from = 0};
  const auto found = watch_slow(trial, 400, 50);
  ASSERT_EQ(found.size(), 8u);
  for (size_t check = 0; check < found.size(); ++check) {
    const std::vector<std::string> expected{"2 2 backward"};
    EXPECT_EQ(found[check],
              check + 1 == report::SlowWatch::kChecks ? expected : std::vector<std::string>())
        << check;
  }
}

TEST(SlowWatch, FollowsTheNewestFrames) {
  const Trial late{
      .ranks = 4, .slow_rank = 1, .phase = Phase::forward, .excess = .4, .slow_from = 600};
  const auto found = watch_slow(late, 900, 50);
  for (size_t check = 0; check < found.size(); ++check) {
    EXPECT_EQ(found[check].size(), check == 14 ? 1u : 0u) << check;  // 650, 700, 750 steps
  }
}

TEST(Doctor, NamesOperatorsThatDidNotOverlapAndWhy) {
  const TempDir dir;
  const Trial trial{
      .ranks = 2, .slow_rank = 0, .phase = Phase::forward, .excess = 0, .slow_from = 0};
  write_histories(dir / "ranks", histories_of(trial, 1, 100));
  const auto line_of = [&](const std::vector<Receipt>& receipts) {
    std::ofstream(dir / "receipts.json") << to_json(receipts);
    const auto lines = report::diagnose(dir.path());
    return lines.at(lines.size() - 3);  // before drift and advice
  };
  Receipt receipt{.op = "gemm_ar", .shape = "m 1 n 64 k 32 f32", .group = 2, .calls = 7};
  receipt.ran = Strategy::overlapped;
  EXPECT_EQ(line_of({receipt}), "operators: all 1 that were asked to overlap did");
  receipt.ran = Strategy::serial;
  receipt.why = "no candidate overlaps: fused: expected K of at least 512";
  EXPECT_EQ(line_of({receipt}),
            "did not overlap: gemm_ar: m 1 n 64 k 32 f32, 2 ranks: automatic ran as serial: no "
            "candidate overlaps: fused: expected K of at least 512 (7 calls)");
  const std::vector<Receipt> many(20, receipt);
  EXPECT_THAT(line_of(many), EndsWith("(7 calls); and 12 more"));
  std::ofstream(dir / "receipts.json") << "[{}]";
  EXPECT_THROW(report::diagnose(dir.path()), IoError);
}

TEST(Doctor, SaysWhatIsMissing) {
  const TempDir dir;
  EXPECT_THROW(report::diagnose(dir / "none"), IoError);
}

TEST(RankMap, HasARowForEveryRankUpTo256) {
  for (const int ranks : {1, 5, 256, 257, 1000}) {
    const TempDir dir;
    const Trial trial{
        .ranks = ranks, .slow_rank = 0, .phase = Phase::forward, .excess = 0, .slow_from = 0};
    write_histories(dir / "ranks", histories_of(trial, 1, 10));
    const auto map = report::rank_map(read_rank_records(dir.path() + "/ranks"));
    EXPECT_LE(map.at("rows").size(), 256u);
    EXPECT_TRUE(ranks > 256 || map.at("rows").size() == size_t(ranks)) << ranks;
    for (const auto& view : map.at("views")) {
      ASSERT_EQ(view.at("ms").size(), map.at("steps").size());
      EXPECT_EQ(view.at("ms")[0].size(), map.at("rows").size());
    }
  }
  EXPECT_TRUE(report::rank_map(read_rank_records("/nowhere/ranks")).is_null());
}

}  // namespace
}  // namespace tandem
