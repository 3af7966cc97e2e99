// Slow links told apart from slow ranks, in generated traces and times.
#include "engine/report/links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/report/diagnosis.h"
#include "observe/trace.h"
#include "observe/trace_merge.h"
#include "tandem/random.h"
#include "tests/engine/train/temp_dir.h"
#include "tests/observe/generated_spans.h"

namespace tandem {
namespace {

using report::LinkTimes;
using report::SlowLink;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Pairs of pipeline ranks, an even one and the next.
RankPosition position_of_pair(int rank, int ranks) {
  return {rank, ranks, 0, rank / 2, rank % 2, false, rank < ranks / 2 ? "a" : "b"};
}

/// OUT of a run: spans, and records in which the late rank's forward passes take twice as long.
void write_run(const std::string& out, const GeneratedSpans& spans) {
  spans.write(out + "/trace");
  for (int rank = 0; rank < spans.ranks; ++rank) {
    RankRecords records(out + "/ranks", position_of_pair(rank, spans.ranks), 0);
    for (int64_t step = 1; step <= 60; ++step) {
      PhaseTimes phases{};
      phases[size_t(Phase::forward)] = rank == spans.late_rank ? 40 : 20;
      phases[size_t(Phase::pp_wait)] = 30;
      records.add(step, 100, phases);
    }
  }
}

std::string said_of(const GeneratedSpans& spans) {
  const TempDir dir;
  write_run(dir / "out", spans);
  std::string text;
  for (const std::string& line : report::diagnose(dir / "out")) text += line + "\n";
  return text;
}

TEST(Links, ASlowLinkIsNamedWithItsAxisAndASlowRankIsNot) {
  GeneratedSpans spans{.ranks = 8, .steps = 40, .max_ahead_s = 3, .max_ppm = 40, .bound_ns = 2000};
  const std::string even = said_of(spans);
  EXPECT_THAT(even, HasSubstr("no link is slower than others of its axis: 8 judged, steps"));
  EXPECT_THAT(even, Not(HasSubstr("slow: ")));
  spans.late_rank = 5;
  EXPECT_THAT(said_of(spans),
              AllOf(HasSubstr("slow: rank 5 "), HasSubstr("held back most by rank 5"),
                    HasSubstr("no link is slower than others of its axis: 8 judged")));
  spans.late_rank = -1;
  spans.slow_from = 6, spans.slow_to = 7, spans.slow_factor = 3;
  EXPECT_THAT(said_of(spans),
              AllOf(HasSubstr("slow link: rank 6 to rank 7 (PP, host b to b): a message of ring "
                              "takes 0.3"),
                    HasSubstr("3.0 times the median of 7 other links"), Not(HasSubstr("slow: ")),
                    Not(HasSubstr("no link is slower"))));
}

TEST(Links, OfATraceInMemoryAreThoseOfTheStream) {
  const TempDir dir;
  const GeneratedSpans spans{
      .ranks = 4, .steps = 20, .bound_ns = 0, .slow_factor = 2.5, .slow_from = 1, .slow_to = 0};
  spans.write(dir / "stream/trace");
  std::filesystem::create_directory(dir / "file");
  write_merged_trace(dir / "stream/trace", {}, dir / "file/trace.json");
  std::vector<RankHistory> ranks;
  for (int rank = 0; rank < 4; ++rank) ranks.push_back({position_of_pair(rank, 4), {}});
  for (const char* run : {"stream", "file"}) {
    const auto links = report::read_links(dir / run, ranks);
    ASSERT_EQ(links.slow.size(), 1u) << run;
    EXPECT_EQ(links.slow[0].from, 1);
    EXPECT_EQ(links.slow[0].to, 0);
    EXPECT_NEAR(links.slow[0].ratio, 2.5, .01);
    EXPECT_EQ(links.judged, 4);
  }
  EXPECT_FALSE(report::read_links(dir / "none", ranks).has_trace);
}

/// Messages of TP, DP and PP among 16 ranks whose times vary by a third, one link slower.
struct NoisyLinks {
  static constexpr int kTp = 2, kDp = 2, kPp = 4;
  std::vector<RankPosition> ranks;
  NoisyLinks() {
    for (int rank = 0; rank < kTp * kDp * kPp; ++rank) {
      ranks.push_back({rank, 16, rank % kTp, rank / kTp % kDp, rank / (kTp * kDp), false, "a"});
    }
  }
  /// Pairs of ranks that differ by one on an axis.
  std::vector<std::pair<int, int>> links() const {
    std::vector<std::pair<int, int>> found;
    for (int a = 0; a < 16; ++a) {
      for (const int b : {a ^ 1, a ^ 2, a + 4, a - 4}) {
        if (b >= 0 && b < 16) found.emplace_back(a, b);
      }
    }
    return found;
  }
  std::vector<SlowLink> find(uint64_t seed, std::pair<int, int> slow, double factor) const {
    LinkTimes times;
    uint64_t draw = 0;
    for (const auto& [from, to] : links()) {
      for (int i = 0; i < 40; ++i) {
        const auto words = philox(17, seed, draw++);
        const int distance = std::abs(from - to);
        double ms = distance == 1 ? 1 : distance == 2 ? 5 : 2;
        ms *= 1 + (words[0] * 0x1p-32 - .5) * .6;
        if (words[1] % 10 == 0) ms *= 4;  // a process that did not get its processor
        if (std::pair(from, to) == slow) ms *= factor;
        // A receiver that came late did not wait.
        const bool waits = words[2] % 3 != 0;
        times.add({distance == 4 ? "pp_gradients" : "ring", from, to, 100, waits ? 99. : 110.,
                   waits ? 100 + ms : 110.001});
      }
    }
    return times.find_slow(ranks, 10, 0);
  }
};

TEST(Links, AnyLinkTwiceAsSlowIsNamedAmongNoise) {
  const NoisyLinks noisy;
  const auto links = noisy.links();
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto link = links[seed * 7 % links.size()];
    const auto found = noisy.find(seed, link, 2);
    ASSERT_EQ(found.size(), 1u) << seed;
    EXPECT_EQ(std::pair(found[0].from, found[0].to), link) << seed;
    EXPECT_NEAR(found[0].ratio, 2, .5);
    EXPECT_TRUE(noisy.find(seed, {-1, -1}, 1).empty()) << seed;
  }
}

std::vector<RankPosition> stages_on_hosts(int count) {
  std::vector<RankPosition> ranks(static_cast<size_t>(count));
  for (int rank = 0; rank < count; ++rank) {
    ranks[size_t(rank)].rank = ranks[size_t(rank)].pp = rank;
    ranks[size_t(rank)].host = std::to_string(rank);
  }
  return ranks;
}

TEST(Links, BothDirectionsBetweenHostsAreJudgedWhateverTheirClocks) {
  const auto ranks = stages_on_hosts(4);
  for (const double error : {-30., 0., 30.}) {  // of rank 2's clock, in ms
    LinkTimes times;
    for (int i = 0; i < 20; ++i) {
      for (int rank = 0; rank < 3; ++rank) {
        const auto on_clock = [&](int of, double ms) { return of == 2 ? ms + error : ms; };
        const double there = rank == 1 ? 5 : 1;
        times.add({"ring", rank, rank + 1, on_clock(rank, 100), on_clock(rank + 1, 40),
                   on_clock(rank + 1, 100 + there)});
        times.add({"ring", rank + 1, rank, on_clock(rank + 1, 100), on_clock(rank, 40),
                   on_clock(rank, 101)});
      }
    }
    const auto slow = times.find_slow(ranks, 1, 50);
    ASSERT_EQ(slow.size(), 1u) << error;
    EXPECT_TRUE(slow[0].is_pair);
    EXPECT_EQ(std::pair(slow[0].from, slow[0].to), std::pair(1, 2));
    EXPECT_NEAR(slow[0].ms, 3, 1e-3);
    EXPECT_NEAR(slow[0].ratio, 3, 1e-3);
  }
}

TEST(Links, OneDirectionBetweenHostsMustExceedTheErrorOfClocks) {
  LinkTimes times;
  const auto ranks = stages_on_hosts(3);
  for (int i = 0; i < 20; ++i) {
    times.add({"ring", 0, 1, 0, 0, 1.});
    times.add({"ring", 1, 2, 0, 0, 3.});
  }
  EXPECT_EQ(times.find_slow(ranks, 1, .9).size(), 1u);
  EXPECT_TRUE(times.find_slow(ranks, 1, 1.1).empty());
  EXPECT_EQ(report::axes_between(ranks[0], ranks[1]), "PP");
}

}  // namespace
}  // namespace tandem
