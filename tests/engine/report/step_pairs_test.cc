#include "engine/report/trace/step_pairs.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "engine/report/report.h"
#include "tandem/communicator.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/report/report_fixture.h"

namespace tandem::report {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

TEST(StepPairs, ChanceIsTheShareOfAllOutcomes) {
  for (int pairs = 0; pairs <= 16; ++pairs) {
    for (int wins = 0; wins <= pairs; ++wins) {
      int64_t outcomes = 0;
      for (uint32_t coins = 0; coins < 1u << pairs; ++coins)
        outcomes += std::popcount(coins) >= wins;
      EXPECT_NEAR(chance_of_wins(wins, pairs), double(outcomes) / std::exp2(pairs), 1e-12)
          << wins << " of " << pairs;
    }
  }
  EXPECT_NEAR(chance_of_wins(5000, 10000), 0.5, 0.01);
}

TEST(StepPairs, ThresholdsAreThoseOfTables) {
  // One-sided sign test at 1 %: fewest wins that count.
  for (const auto& [pairs, wins] :
       {std::pair{7, 7}, {10, 10}, {16, 14}, {22, 17}, {50, 34}, {60, 40}, {100, 63}}) {
    EXPECT_EQ(compare_pairs(wins, pairs - wins), Shown::faster) << wins << " of " << pairs;
    EXPECT_EQ(compare_pairs(pairs - wins, wins), Shown::slower) << wins << " of " << pairs;
    EXPECT_EQ(compare_pairs(wins - 1, pairs - wins + 1), Shown::nothing) << pairs;
    EXPECT_EQ(compare_pairs(pairs - wins + 1, wins - 1), Shown::nothing) << pairs;
  }
  EXPECT_EQ(compare_pairs(13, 9), Shown::nothing);
  for (int pairs = 0; pairs < 7; ++pairs) EXPECT_EQ(compare_pairs(pairs, 0), Shown::nothing);
}

/// Counts what `measurements` of `pairs` steps show whose times have `noise`, in shares of a step.
struct Verdicts {
  int faster = 0, slower = 0, nothing = 0;
};
Verdicts measure(int measurements, int pairs, double gain, double noise, uint64_t seed) {
  Verdicts all;
  for (int i = 0; i < measurements; ++i) {
    int64_t faster = 0, slower = 0;
    for (int pair = 0; pair < pairs; ++pair) {
      const auto at = uint64_t(2 * (i * pairs + pair));
      const double serial = 1 + noise * double(normal(seed, 0, at));
      const double overlapped = 1 - gain + noise * double(normal(seed, 0, at + 1));
      (overlapped < serial ? faster : slower) += 1;
    }
    switch (compare_pairs(faster, slower)) {
      case Shown::faster:
        ++all.faster;
        break;
      case Shown::slower:
        ++all.slower;
        break;
      case Shown::nothing:
        ++all.nothing;
        break;
    }
  }
  return all;
}

TEST(StepPairs, NoiseAloneIsRarelyShown) {
  for (const int pairs : {22, 60, 98}) {
    const Verdicts all = measure(4000, pairs, 0, 0.2, uint64_t(pairs));
    EXPECT_LE(all.faster, 80) << pairs;  // 1 % of 4000, and six deviations
    EXPECT_LE(all.slower, 80) << pairs;
  }
}

TEST(StepPairs, GainsFarAboveTheNoiseAreShown) {
  for (const double noise : {0.02, 0.05, 0.1}) {
    const Verdicts faster = measure(500, 60, 1.5 * noise, noise, 5);
    EXPECT_GE(faster.faster, 495) << noise;
    EXPECT_EQ(faster.slower, 0) << noise;
    const Verdicts slower = measure(500, 60, -1.5 * noise, noise, 6);
    EXPECT_GE(slower.slower, 495) << noise;
    EXPECT_EQ(slower.faster, 0) << noise;
  }
}

TEST(StepPairs, TransfersTakeAsLongAsTheGemms) {
  for (uint64_t i = 0; i < 2000; ++i) {
    const auto between = [&](double low, double high, uint64_t which) {
      const double uniform = double(philox(9, i, which)[0]) / 4294967296.0;
      return low * std::pow(high / low, uniform);
    };
    StepLoad load;
    load.gemm_s = between(1e-4, 10, 0), load.sent_bytes = between(1e3, 1e11, 1);
    load.step_s = load.gemm_s * between(1, 10, 2);
    const LinkChoice link = choose_link(load);
    EXPECT_NO_THROW((EmulatedLink{link.bytes_per_s, link.latency_s}.check()));
    EXPECT_NEAR(load.sent_bytes / link.bytes_per_s / load.gemm_s, 1, 0.06);
    EXPECT_GE(link.latency_s, 0.99e-6);
    EXPECT_LE(link.latency_s, 30.01e-6);
    const int64_t pairs = choose_pairs(load);
    EXPECT_GE(pairs, 24);
    EXPECT_LE(pairs, 100);
    const double seconds = double(pairs) * 2 * (load.step_s + load.gemm_s);
    EXPECT_TRUE(pairs == 24 || seconds <= 12.01) << pairs << " pairs take " << seconds << " s";
  }
}

TEST(StepPairs, UnknownLoadsAreNamed) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const StepLoad& load : {StepLoad{0, 1, 1}, {1, 0, 1}, {1, 1, 0}, {nan, 1, 1}, {1, 1, nan}}) {
    try {
      choose_link(load);
      FAIL();
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("--link"), std::string::npos) << error.what();
    }
  }
}

// Pairs that go either way: 13 of 22 faster, as chance alone gives in 26 % of measurements.
TEST(StepPairs, ReportsShowNoDifferenceWithinTheNoise) {
  for (const int faster : {13, 4}) {
    const fs::path folder =
        fs::temp_directory_path() / fmt::format("tandem_step_pairs_{}", ::getpid());
    write_made_up_run(folder, "x");
    for (const bool overlapped : {false, true}) {
      std::ofstream out(folder / "split" / (overlapped ? "overlapped" : "serial") /
                        "metrics.jsonl");
      for (int i = 0; i < 24; ++i) {
        const int step = !overlapped ? 100 : i - 2 < faster ? 90 : 105;
        out << "{\"step\":" << i + 1 << ",\"loss\":1,\"step_ms\":" << step
            << ",\"gemm_ms\":60,\"compute_ms\":80,\"exposed_comm_ms\":10}\n";
      }
    }
    const std::string text = write_report(folder);
    std::ifstream summary(folder / "summary.json");
    const auto split = nlohmann::json::parse(summary).at("step_split");
    EXPECT_EQ(split.at("pairs_overlapped_faster"), faster);
    EXPECT_EQ(split.at("shown"), faster == 4);
    EXPECT_THAT(text,
                HasSubstr(faster == 4 ? "slower today: chance alone gives as many in 0.22 %"
                                      : "not shown today: chance alone gives as many in 26 %"));
    EXPECT_EQ(text.find(" %, not shown today") == std::string::npos, faster == 4) << text;
    fs::remove_all(folder);
  }
}

}  // namespace
}  // namespace tandem::report
