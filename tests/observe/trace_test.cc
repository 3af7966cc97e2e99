#include "observe/trace.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tandem/error.h"

namespace tandem {
namespace {

TimePoint at(double us) {
  return TimePoint(std::chrono::nanoseconds(int64_t(us * 1e3)));
}

// Two ranks send each other two tiles while they compute; rank 1 waits for tile 1 of rank 0.
std::vector<RankEvents> two_ranks() {
  std::vector<RankEvents> ranks(2);
  ranks[0] = {0, {}, {}};
  ranks[1] = {1, {}, {}};
  ranks[0].events = {{SpanKind::transfer, "put", at(1000), at(1100), 0, 1},
                     {SpanKind::transfer, "put", at(1100), at(1250), 1, 1},
                     {SpanKind::gemm, "ag_gemm", at(1000), at(1200), 0, -1}};
  ranks[1].events = {{SpanKind::gemm, "ag_gemm", at(1010), at(1180), 0, -1},
                     {SpanKind::wait, "ag_gemm", at(1180), at(1251), 1, 0},
                     {SpanKind::gemm, "ag_gemm", at(1251), at(1400), 1, -1},
                     {SpanKind::transfer, "put", at(1000), at(1300), 0, 0},
                     {SpanKind::transfer, "put", at(1050), at(1200), 1, 0}};
  return ranks;
}

TEST(Trace, IsCompleteMonotoneAndHasNoCrossingSlices) {
  const auto ranks = two_ranks();
  const auto json = nlohmann::json::parse(trace_json(ranks));
  std::map<std::pair<int, int>, double> free_at;
  std::set<std::pair<int, int>> named;
  double last = 0;
  size_t slices = 0;
  for (const auto& event : json.at("traceEvents")) {
    const std::string phase = event.at("ph");
    const std::pair lane{event.at("pid").get<int>(), event.at("tid").get<int>()};
    if (phase == "M") {
      if (event.at("name") == "thread_name") named.insert(lane);
      continue;
    }
    const double ts = event.at("ts");
    EXPECT_GE(ts, last);
    last = ts;
    if (phase != "X") continue;
    ++slices;
    EXPECT_TRUE(named.contains(lane));
    EXPECT_GE(ts, free_at[lane]);
    free_at[lane] = ts + event.at("dur").get<double>();
  }
  EXPECT_EQ(slices, 8u);
  EXPECT_NEAR(json.at("traceEvents").back().at("ts").get<double>(), 251, 1e-6);
}

TEST(Trace, ArrowsJoinTheTransferToTheWaitItEnded) {
  const auto ranks = two_ranks();
  const auto found = arrows(ranks);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].from, 0u);
  EXPECT_EQ(found[0].transfer, 1u);
  EXPECT_EQ(found[0].to, 1u);
  EXPECT_EQ(found[0].wait, 1u);

  const auto json = nlohmann::json::parse(trace_json(ranks));
  std::map<std::string, nlohmann::json> ends;
  for (const auto& event : json.at("traceEvents")) {
    if (event.at("ph") == "s" || event.at("ph") == "f") ends[event.at("ph")] = event;
  }
  ASSERT_EQ(ends.size(), 2u);
  EXPECT_EQ(ends["s"].at("id"), ends["f"].at("id"));
  EXPECT_EQ(ends["s"].at("pid"), 0);
  EXPECT_EQ(ends["f"].at("pid"), 1);
  EXPECT_EQ(ends["f"].at("bp"), "e");
  EXPECT_LE(ends["s"].at("ts").get<double>(), ends["f"].at("ts").get<double>());
}

TEST(Trace, ArrowsNeedMatchingTileAndTime) {
  auto ranks = two_ranks();
  ranks[0].events[1].tile = 7;  // another tile
  EXPECT_TRUE(arrows(ranks).empty());
  ranks[0].events[1].tile = -1;  // unknown: the time decides
  EXPECT_EQ(arrows(ranks).size(), 1u);
  ranks[0].events[1].end = at(1179);  // arrived before the wait began
  EXPECT_TRUE(arrows(ranks).empty());
}

/// Waits that many transfers arrive in, of other tiles.
TEST(Trace, ArrowsOfManyTransfersDoNotCompareAllPairs) {
  constexpr int kEvents = 100'000;
  std::vector<RankEvents> ranks{{0, {}, {}}, {1, {}, {}}};
  for (int i = 0; i < kEvents; ++i) {
    ranks[0].events.push_back({SpanKind::transfer, "x", at(i), at(i + 1), i, 1});
    ranks[1].events.push_back({SpanKind::wait, "x", at(0), at(2 * kEvents), kEvents - i, 0});
  }
  const auto found = arrows(ranks);
  ASSERT_EQ(found.size(), size_t(kEvents - 1));  // no transfer of the first wait's tile
  EXPECT_EQ(found[0].transfer, size_t(kEvents - 1));
  EXPECT_EQ(found[0].wait, 1u);
}

TEST(Trace, LargestClockBoundIsRecorded) {
  auto ranks = two_ranks();
  ranks[0].step = 7;
  EXPECT_FALSE(nlohmann::json::parse(trace_json(ranks)).at("otherData").contains("clock_bound_us"));
  ranks[0].clock_bound_ns = 0;
  ranks[1].clock_bound_ns = 2500;
  const auto json = nlohmann::json::parse(trace_json(ranks));
  EXPECT_EQ(json.at("otherData").at("clock_bound_us").get<double>(), 2.5);
  EXPECT_EQ(json.at("otherData").at("step"), 7);
}

TEST(Trace, OriginAlignsClocks) {
  auto ranks = two_ranks();
  const std::string aligned = trace_json(ranks);
  for (SpanEvent& event : ranks[1].events) {
    event.begin += std::chrono::seconds(5);
    event.end += std::chrono::seconds(5);
  }
  ranks[1].origin += std::chrono::seconds(5);
  EXPECT_EQ(trace_json(ranks), aligned);
}

TEST(Recorder, LabelsNestAndAreRestored) {
  EXPECT_STREQ(product_label().name, "gemm");
  {
    const ScopedLabel outer("ag_gemm", 3);
    {
      const ScopedLabel inner("gemm_rs", -1);
      EXPECT_STREQ(product_label().name, "gemm_rs");
    }
    EXPECT_STREQ(product_label().name, "ag_gemm");
    EXPECT_EQ(product_label().tile, 3);
  }
  EXPECT_STREQ(product_label().name, "gemm");
}

TEST(Trace, EmptyIsValid) {
  EXPECT_TRUE(nlohmann::json::parse(trace_json({})).at("traceEvents").empty());
}

TEST(Trace, OddNamesAreEscaped) {
  const std::vector<RankEvents> ranks{
      {0, {{SpanKind::gemm, "a\"b\\c\n\xff", at(0), at(1), -1, -1}}, {}}};
  EXPECT_EQ(nlohmann::json::parse(trace_json(ranks)).at("traceEvents").back().at("name"),
            "a\"b\\c??");
}

TEST(Trace, PackRoundTripsAndTruncationsAreRefused) {
  const auto ranks = two_ranks();
  const std::vector<RankEvents> back{unpack(pack(ranks[0])), unpack(pack(ranks[1]))};
  EXPECT_EQ(trace_json(back), trace_json(ranks));
  const auto blob = pack(ranks[0]);
  for (size_t n = 0; n < blob.size(); ++n) {
    EXPECT_THROW(unpack(std::span(blob).first(n)), InvalidArgument) << n;
  }
  auto bad = blob;
  bad[0] ^= std::byte{1};
  EXPECT_THROW(unpack(bad), InvalidArgument);
}

TEST(Trace, WriteNamesTheFileItCannotWrite) {
  const auto dir = std::filesystem::temp_directory_path();
  const auto file = dir / "tandem_trace_test.json";
  write_trace(file, two_ranks());
  std::ifstream in(file);
  EXPECT_EQ(nlohmann::json::parse(in).at("displayTimeUnit"), "ms");
  std::filesystem::remove(file);
  try {
    write_trace(dir / "no such folder" / "trace.json", two_ranks());
    FAIL();
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("no such folder/trace.json"), std::string::npos);
  }
}

}  // namespace
}  // namespace tandem
