// Picture and figures of a timeline, from synthetic events of GPUs and of CPU ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/report/trace/layer.h"
#include "engine/report/trace/timeline_svg.h"
#include "engine/report/trace/trace_times.h"
#include "tandem/error.h"
#include "tests/engine/report/report_fixture.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

// A wait, the GEMM that it delays, and a transfer during the GEMM, on multiprocessor 3.
std::vector<RankEvents> one_tile() {
  return {{2,
           {{SpanKind::wait, "ag_gemm", at_us(100), at_us(500), 7, 1, 3},
            {SpanKind::gemm, "ag_gemm", at_us(500), at_us(1100), 7, -1, 3},
            {SpanKind::transfer, "gemm_rs", at_us(600), at_us(1100), 7, 0, 3}},
           {}}};
}

// Events of `processors` multiprocessors per rank: one wait each, half of it hidden by a GEMM.
std::vector<RankEvents> many(int ranks, int processors) {
  std::vector<RankEvents> result;
  for (int r = 0; r < ranks; ++r) {
    RankEvents& rank = result.emplace_back(RankEvents{r, {}, at_us(50 * r)});
    for (int p = 0; p < processors; ++p) {
      const double start = 50 * r + 1000;
      const auto add = [&](SpanKind kind, double begin, double end) {
        rank.events.push_back({kind, "gemm_rs", at_us(start + begin), at_us(start + end), p, 0, p});
      };
      add(SpanKind::gemm, 0, 40);
      add(SpanKind::wait, 20, 60);
      add(SpanKind::gemm, 60, 90);
      add(SpanKind::gemm, 80, 100);
      add(SpanKind::transfer, 30, 80);
    }
  }
  return result;
}

size_t count(const std::string& text, const std::string& needle) {
  size_t n = 0;
  for (size_t at = text.find(needle); at != std::string::npos; at = text.find(needle, at + 1)) ++n;
  return n;
}

TEST(Picture, DrawsEverySliceAtItsTime) {
  const std::string svg = timeline_svg(one_tile(), {.title = "AG < 1 & more"});
  EXPECT_THAT(svg, HasSubstr("<path fill=\"#d9491e\" d=\"M96.0 62h435.5v9H96.0z\"/>"));
  EXPECT_THAT(svg, HasSubstr("<path fill=\"#2b62c4\" d=\"M532.0 62h653.5v9H532.0z\"/>"));
  EXPECT_THAT(svg, HasSubstr("<path fill=\"#12947f\" d=\"M641.0 72h544.5v3H641.0z\"/>"));
  EXPECT_LT(svg.find("#d9491e\" d="), svg.find("#2b62c4\" d=")) << "a product hides a wait";
  EXPECT_THAT(svg, HasSubstr(">AG &lt; 1 &amp; more</text>"));
  EXPECT_THAT(svg, HasSubstr(">rank 2</text>"));
  EXPECT_THAT(svg, HasSubstr(">SM 3</text>"));
  EXPECT_THAT(svg, HasSubstr(">100 µs</text>"));
  for (const char* key : {">waited<", ">product<", ">sent<", ">idle or not recorded<"})
    EXPECT_EQ(count(svg, key), 1u) << key;
  EXPECT_THAT(svg, Not(HasSubstr("checkpoint")));
  EXPECT_THAT(svg, Not(HasSubstr("multiprocessors")));
  EXPECT_THAT(svg, Not(HasSubstr("script")));
}

TEST(Picture, ShowsSomeMultiprocessorsAndTheirTotal) {
  const std::string svg = timeline_svg(many(4, 132), {.title = "", .processors = 16});
  EXPECT_EQ(count(svg, ">SM "), 4u * 16u);
  EXPECT_EQ(count(svg, ">SM 0<"), 4u);
  EXPECT_EQ(count(svg, ">SM 123<"), 4u);
  EXPECT_THAT(svg, HasSubstr(">16 of 132 multiprocessors of each rank</text>"));
  EXPECT_EQ(count(timeline_svg(many(1, 5), {}), ">SM "), 5u);
}

TEST(Picture, CpuRanksHaveARowEachAndOneForTheLink) {
  const auto ranks = made_up_trace(true);
  const Layer layer = one_layer(ranks);
  const std::string svg = timeline_svg(layer.ranks, {.title = "layer"});
  EXPECT_EQ(count(svg, ">SM "), 0u);
  EXPECT_EQ(count(svg, "fill=\"#12947f\" d="), 2u);
  EXPECT_EQ(count(svg, "fill=\"#2b62c4\" d="), 2u);
  EXPECT_THAT(svg, HasSubstr(">other computation<"));
}

TEST(Picture, EmptyTimelineIsAValidPicture) {
  for (const auto& ranks : {std::vector<RankEvents>{}, std::vector<RankEvents>{{0, {}, {}}}}) {
    const std::string svg = timeline_svg(ranks, {.title = "empty"});
    EXPECT_EQ(svg.rfind("<svg ", 0), 0u);
    EXPECT_THAT(svg, HasSubstr("</svg>"));
    EXPECT_THAT(svg, Not(HasSubstr("nan")));
    EXPECT_THAT(svg, Not(HasSubstr("inf")));
  }
}

TEST(TraceTimes, OverlappingEventsCountOnce) {
  const auto times = rank_times(many(2, 3));
  ASSERT_EQ(times.size(), 2u);
  for (const RankTimes& t : times) {
    EXPECT_EQ(t.processors, 3);
    EXPECT_NEAR(t.span_us, 100, 1e-6);
    EXPECT_NEAR(t.gemm_us, 80, 1e-6);  // 40, and 40 of two that overlap
    EXPECT_NEAR(t.compute_us, 0, 1e-6);
    EXPECT_NEAR(t.exposed_wait_us, 20, 1e-6);
    EXPECT_NEAR(t.transfer_us, 50, 1e-6);
  }
  EXPECT_EQ(as_text(std::span(times).first(1)),
            " rank   SMs         us   GEMM %  other %   wait %   sent %\n"
            "    0     3      100.0     80.0      0.0     20.0     50.0\n");
}

TEST(TraceTimes, CopyEngineTransfersCountInFull) {
  auto ranks = many(1, 3);
  for (SpanEvent& event : ranks[0].events) {
    if (event.kind == SpanKind::transfer) event.processor = -1;
  }
  const auto times = rank_times(ranks);
  EXPECT_EQ(times.at(0).processors, 3);
  EXPECT_NEAR(times.at(0).transfer_us, 50, 1e-6);
  EXPECT_NEAR(times.at(0).gemm_us, 80, 1e-6);
}

TEST(TraceTimes, CpuRanksHaveNoMultiprocessors) {
  const auto times = rank_times(made_up_trace(true));
  EXPECT_EQ(times.at(0).processors, 0);
  EXPECT_GT(times.at(0).compute_us, 0);
  EXPECT_GT(times.at(0).exposed_wait_us, 0);
  EXPECT_THAT(as_text(times), testing::StartsWith(" rank         us   GEMM %"));
}

TEST(DeviceTrace, RoundTripsThroughTheFileAndThroughPack) {
  const auto ranks = many(2, 4);
  const fs::path file = fs::temp_directory_path() / "tandem_timeline_test.json";
  write_trace(file, ranks);
  const auto read = read_trace(file);
  EXPECT_EQ(trace_json(read), trace_json(ranks));
  EXPECT_EQ(trace_json(std::vector{unpack(pack(ranks[0])), unpack(pack(ranks[1]))}),
            trace_json(ranks));
  EXPECT_EQ(timeline_svg(read, {}), timeline_svg(ranks, {}));
  EXPECT_THAT(trace_json(ranks), HasSubstr(R"("name":"SM 3 wait")"));
  fs::remove(file);
}

TEST(Trace, NamesItsStep) {
  auto ranks = made_up_trace(true);
  const fs::path file = fs::temp_directory_path() / "tandem_timeline_step.json";
  for (const int64_t step : {-1, 32}) {
    for (RankEvents& rank : ranks) rank.step = step;
    write_trace(file, ranks);
    EXPECT_EQ(read_trace(file).at(1).step, step);
  }
  fs::remove(file);
}

TEST(Trace, OtherFilesAreRefusedWithAReason) {
  const fs::path file = fs::temp_directory_path() / "tandem_timeline_other.json";
  for (const char* text : {"", "{", "[]", "{\"summary\":1}", "{\"traceEvents\":[{}]}"}) {
    std::ofstream(file) << text;
    try {
      read_trace(file);
      ADD_FAILURE() << text;
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), HasSubstr("tandem_timeline_other.json: "));
      EXPECT_THAT(error.what(), Not(HasSubstr("json.exception"))) << text;
    }
  }
  fs::remove(file);
}

TEST(DeviceTrace, WrongFilesAreNamed) {
  const fs::path file = fs::temp_directory_path() / "tandem_timeline_bad.json";
  const auto message = [&](const std::string& event) {
    std::ofstream(file) << "{\"traceEvents\":[" << event << "]}";
    try {
      read_trace(file);
    } catch (const IoError& error) {
      return std::string(error.what());
    }
    return std::string("nothing thrown");
  };
  const auto event = [](const std::string& kind, const std::string& args) {
    return R"({"ph":"X","pid":0,"tid":1,"ts":0,"dur":1,"cat":")" + kind +
           R"(","name":"a","args":{)" + args + "}}";
  };
  EXPECT_EQ(message(event("gemm", "\"processor\":131")), "nothing thrown");
  for (const std::string& bad :
       {event("gemm", "\"processor\":10000"), event("gemm", "\"processor\":-2"),
        event("gemm", "\"processor\":\"three\""), event("product", ""), std::string("{"),
        std::string("{\"ph\":\"X\"}")}) {
    EXPECT_THAT(message(bad), HasSubstr("tandem_timeline_bad.json: ")) << bad;
  }
  EXPECT_THAT(message(event("gemm", "\"processor\":10000")),
              HasSubstr("processor 10000: expected"));
  fs::remove(file);
}

TEST(Layer, TimesAreRelativeToItsBegin) {
  auto ranks = made_up_trace(true);
  const Layer layer = one_layer(ranks);
  ASSERT_EQ(layer.ranks.size(), 2u);
  TimePoint first = TimePoint::max(), last{};
  for (const SpanEvent& event : layer.ranks[0].events) {
    first = std::min(first, event.begin);
    last = std::max(last, event.end);
  }
  EXPECT_EQ(first, TimePoint{});
  EXPECT_EQ(last.time_since_epoch(), layer.span);
  EXPECT_TRUE(one_layer({}).ranks.empty());
  // Tiles of a GPU call have no repetition with a layer's many names.
  EXPECT_EQ(one_layer(many(1, 8)).ranks.at(0).events.size(), 8u * 5u);
  EXPECT_TRUE(layer.repeats);
  EXPECT_FALSE(one_layer(many(1, 8)).repeats);
}

/// One computation of 1 us a name.
std::vector<RankEvents> operations_of(const std::vector<int>& names) {
  std::vector<RankEvents> ranks(1);
  for (size_t i = 0; i < names.size(); ++i) {
    ranks[0].events.push_back({SpanKind::compute, intern("op" + std::to_string(names[i])),
                               at_us(double(i)), at_us(double(i + 1)), -1, -1});
  }
  return ranks;
}

/// First operation and length of the second of two equal sequences, the shortest and then the first
/// with three different names; {0, 0} if there are none.
std::pair<size_t, size_t> repeat_by_definition(const std::vector<int>& names) {
  for (size_t period = 3; 2 * period <= names.size(); ++period) {
    for (size_t begin = 0; begin + 2 * period <= names.size(); ++begin) {
      const auto at = names.begin() + ptrdiff_t(begin), middle = at + ptrdiff_t(period);
      if (std::equal(at, middle, middle) && std::set<int>(at, middle).size() >= 3) {
        return {begin + period, period};
      }
    }
  }
  return {0, 0};
}

TEST(Layer, IsTheFirstOfTheShortestPeriod) {
  std::mt19937 random(1);
  int num_repeats = 0;
  for (int i = 0; i < 3000; ++i) {
    std::vector<int> names(1 + random() % 40);
    const auto alphabet = unsigned(2 + i % 5);
    for (int& name : names) name = int(random() % alphabet);
    if (i % 3 == 0) {  // several layers
      const size_t period = 1 + random() % 8;
      for (size_t at = period + random() % 8; at < names.size(); ++at)
        names[at] = names[at - period];
    }
    const auto [second, period] = repeat_by_definition(names);
    const Layer layer = one_layer(operations_of(names));
    ASSERT_EQ(layer.repeats, period > 0) << testing::PrintToString(names);
    if (period == 0) continue;
    ++num_repeats;
    ASSERT_EQ(layer.span, std::chrono::microseconds(period)) << testing::PrintToString(names);
    ASSERT_EQ(layer.ranks[0].events.front().name, "op" + std::to_string(names[second]));
  }
  EXPECT_GT(num_repeats, 300);
}

/// With a comparison of all pairs this takes minutes.
TEST(Layer, IsFoundAmongHalfAMillionOperations) {
  std::vector<int> different(500'000), equal(500'000, 7), late(500'000);
  for (size_t i = 0; i < different.size(); ++i) {
    different[i] = int(i);
    late[i] = i < 300'000 ? int(i) : int(300'000 + i % 100'000);
  }
  EXPECT_FALSE(one_layer(operations_of(different)).repeats);
  EXPECT_FALSE(one_layer(operations_of(equal)).repeats);
  EXPECT_EQ(one_layer(operations_of(late)).span, std::chrono::microseconds(100'000));
}

TEST(LaneRows, EveryEventTakesTheFirstFreeRow) {
  std::mt19937 random(2);
  std::vector<SpanEvent> events;
  for (int i = 0; i < 2000; ++i) {
    const double begin = i / 3;
    events.push_back({SpanKind::transfer, "x", at_us(begin), at_us(begin + random() % 50)});
  }
  const std::vector<int> rows = lane_rows(events);
  std::vector<TimePoint> free_at(100, TimePoint::min());
  for (size_t i = 0; i < events.size(); ++i) {
    size_t row = 0;
    while (free_at[row] > events[i].begin) ++row;
    ASSERT_EQ(rows[i], int(row)) << i;
    free_at[row] = events[i].end;
  }
  // All at once.
  std::vector<SpanEvent> overlapping(300'000, {SpanKind::wait, "x", at_us(0), at_us(1)});
  EXPECT_EQ(lane_rows(overlapping).back(), 299'999);
}

}  // namespace
}  // namespace tandem
