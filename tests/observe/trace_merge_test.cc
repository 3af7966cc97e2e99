// Merged traces of ranks: form, arrows, clocks, limits on disk and in memory.
#include "observe/trace_merge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/system/files.h"
#include "observe/trace.h"
#include "tandem/error.h"
#include "tests/engine/train/temp_dir.h"
#include "tests/observe/generated_spans.h"
#include "tests/observe/trace_form.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

nlohmann::json merged_json(const TempDir& dir, const StepRange& steps = {}) {
  write_merged_trace(dir / "trace", steps, dir / "merged.json");
  return nlohmann::json::parse(read_file(dir / "merged.json"));
}

using ArrowKey = std::tuple<std::string, int, double, int, double>;

std::vector<ArrowKey> keys_of(const TraceForm& form) {
  std::vector<ArrowKey> keys;
  for (const FormArrow& arrow : form.arrows) {
    keys.emplace_back(arrow.name, arrow.from->rank, arrow.from->begin, arrow.to->rank,
                      arrow.to->end);
  }
  std::ranges::sort(keys);
  return keys;
}

TEST(TraceMerge, HasTheFormAndTheArrowsOfATraceInMemory) {
  const TempDir dir;
  const GeneratedSpans spans{.ranks = 6, .steps = 4, .filler = 2, .bound_ns = 0};
  spans.write(dir / "trace");
  const auto merged = check_form(merged_json(dir));
  std::vector<RankEvents> ranks;
  for (int rank = 0; rank < spans.ranks; ++rank) {
    ranks.push_back({rank, {}, {}});
    for (int64_t step = 0; step < spans.steps; ++step) {
      for (const SpanEvent& event : spans.events(rank, step)) ranks.back().events.push_back(event);
    }
  }
  const auto in_memory = check_form(nlohmann::json::parse(trace_json(ranks)));
  EXPECT_EQ(merged.slices.size(), in_memory.slices.size());
  EXPECT_EQ(int64_t(merged.arrows.size()), spans.steps * spans.arrows_of_step());
  EXPECT_EQ(keys_of(merged), keys_of(in_memory));
}

TEST(TraceMerge, ArrowsDoNotGoBackByMoreThanTheBoundOfShiftedAndDriftingClocks) {
  for (const auto& [ahead, ppm] : {std::pair(1000.0, 0.0), {0.0, 90.0}, {-50.0, 50.0}}) {
    const TempDir dir;
    GeneratedSpans spans{
        .ranks = 4, .steps = 400, .max_ahead_s = ahead, .max_ppm = ppm, .bound_ns = 10'000};
    spans.write(dir / "trace");
    const auto trace = merged_json(dir);
    const double bound_us = trace.at("otherData").at("clock_bound_us");
    EXPECT_EQ(bound_us, 10);
    EXPECT_LE(trace["otherData"]["backward_us"].get<double>(), 2 * bound_us);
    const auto form = check_form(trace);
    // Step by step, each span is where its rank recorded it on the clock of rank 0.
    for (const FormSlice& slice : form.slices) {
      if (slice.name != "sums") continue;
      const int64_t step = slice.args["flow"][2];
      const int64_t end = step * spans.step_ns() + (8 * spans.messages + 30) * spans.kUnit;
      EXPECT_NEAR(slice.end, double(end - spans.kUnit) / 1e3, 2 * bound_us + 1) << slice.rank;
    }
    EXPECT_EQ(int64_t(form.arrows.size()), spans.steps * spans.arrows_of_step());
    // Without the measured clocks the same spans are far apart.
    spans.measures_clocks = false;
    spans.write(dir / "trace");
    EXPECT_GT(merged_json(dir)["otherData"]["backward_us"].get<double>(), 2 * bound_us);
  }
}

TEST(TraceMerge, AJumpOfAClockWidensTheBound) {
  const ClockOffset before{1'000'000'000, 500, 100}, after{2'000'000'000, 40'500, 200};
  EXPECT_EQ(bound_between(before, after), 200);  // 40 us in a second: drift
  const ClockOffset jumped{2'000'000'000, 5'000'500, 200};
  EXPECT_EQ(bound_between(before, jumped), 200 + 5'000'000);
}

TEST(TraceMerge, OnlyTheStepsAskedForAreWritten) {
  const TempDir dir;
  const GeneratedSpans spans{.steps = 40};
  spans.write(dir / "trace");
  const auto trace = merged_json(dir, {17, 19});
  EXPECT_EQ(trace["otherData"]["step"], 17);
  EXPECT_EQ(trace["otherData"]["last_step"], 19);
  EXPECT_EQ(int64_t(check_form(trace).arrows.size()), 3 * spans.arrows_of_step());
}

TEST(TraceMerge, NewestSegmentsStayWithinTheLimit) {
  const TempDir dir;
  GeneratedSpans spans{.ranks = 2, .steps = 400, .messages = 10, .filler = 10};
  spans.max_bytes = 1 << 20;
  spans.write(dir / "trace");
  uint64_t bytes = 0;
  for (const std::string& name : names_in(dir / "trace")) {
    bytes += std::filesystem::file_size(dir / ("trace/" + name));
  }
  EXPECT_LE(bytes, 2 * (uint64_t(spans.max_bytes) + 4 * 20'000));  // a step may exceed a segment
  EXPECT_GT(bytes, uint64_t(spans.max_bytes));
  const auto trace = merged_json(dir);
  EXPECT_GT(trace["otherData"]["step"], 50);
  EXPECT_EQ(trace["otherData"]["last_step"], 400);
  EXPECT_EQ(trace["otherData"]["clock_bound_us"], 20);
  const StepRange newest = newest_steps(dir / "trace");
  EXPECT_GT(newest.first, trace["otherData"]["step"].get<int64_t>());
  EXPECT_LT(newest.first, 400);
}

TEST(TraceMerge, SpansAreNotWrittenThroughALink) {
  const TempDir dir;
  const GeneratedSpans spans{.ranks = 2, .steps = 4};
  spans.write(dir / "other");
  const std::vector<std::string> before = names_in(dir / "other");
  std::filesystem::create_symlink("other", dir / "trace");
  EXPECT_THROW(SpanWriter(dir / "trace", 0, 1, 1 << 20), IoError);
  EXPECT_EQ(names_in(dir / "other"), before);
}

TEST(TraceMerge, AnotherStartReplacesSegmentsAndRanks) {
  const TempDir dir;
  GeneratedSpans{.ranks = 4, .steps = 6}.write(dir / "trace");
  GeneratedSpans{.ranks = 2, .steps = 3}.write(dir / "trace");
  const auto trace = merged_json(dir);
  EXPECT_EQ(trace["otherData"]["last_step"], 3);
  for (const FormSlice& slice : check_form(trace).slices) EXPECT_LT(slice.rank, 2);
}

/// Peak memory that merging adds to this process.
int64_t peak_of_merge(const std::string& folder) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto peak = [] {
      rusage usage;
      getrusage(RUSAGE_SELF, &usage);
      return int64_t(usage.ru_maxrss) << 10;
    };
    int64_t grown = -1;
    try {
      const int64_t before = peak();
      write_merged_trace(folder, {}, "/dev/null");
      grown = peak() - before;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    const ssize_t written = write(ends[1], &grown, sizeof grown);
    ::_exit(written == sizeof grown ? 0 : 1);  // NOLINT: no destructors of the test program
  }
  close(ends[1]);
  int64_t grown = -1;
  EXPECT_EQ(read(ends[0], &grown, sizeof grown), ssize_t(sizeof grown));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return grown;
}

TEST(TraceMerge, MemoryOf64RanksIsThatOfAFewSteps) {
  constexpr int64_t kBound = 16 << 20;
  GeneratedSpans spans{.ranks = 64, .steps = 20, .messages = 10, .filler = 8};
  const TempDir dir;
  spans.write(dir / "short");
  spans.steps = 70;
  spans.write(dir / "long");
  const int64_t brief = peak_of_merge(dir / "short"), full = peak_of_merge(dir / "long");
  const size_t events = spans.events(0, 0).size() * size_t(spans.ranks * spans.steps);
  RecordProperty("short_bytes", std::to_string(brief));
  RecordProperty("long_bytes", std::to_string(full));
  ASSERT_GT(brief, 0);
  EXPECT_LT(full, kBound);
  EXPECT_LT(full, brief + (4 << 20)) << "it grows with the steps";
  EXPECT_GT(events * sizeof(SpanEvent), size_t(2 * kBound)) << "all events would exceed the bound";
}

TEST(TraceMerge, DamagedAndMissingFilesAreNamed) {
  const TempDir dir;
  const GeneratedSpans spans{.ranks = 3, .steps = 3};
  spans.write(dir / "trace");
  const auto error_of = [&] {
    try {
      write_merged_trace(dir / "trace", {}, dir / "merged.json");
      return std::string("accepted");
    } catch (const IoError& error) {
      return std::string(error.what());
    }
  };
  const std::string path = dir / "trace/1.0.spans", bytes = read_file(path);
  for (const size_t cut : {1, 60, 100, 300}) {  // as of a rank that was killed
    write_file(path, bytes.substr(0, bytes.size() - cut));
    EXPECT_EQ(error_of(), "accepted") << cut;
  }
  std::string damaged = bytes;
  damaged[0] ^= 1;
  write_file(path, damaged);
  EXPECT_THAT(error_of(), HasSubstr("trace/1.0.spans: no record of rank 1 at byte 0"));
  damaged = bytes;
  damaged[bytes.size() / 2 / 8 * 8 + 3] ^= 0x55;
  write_file(path, damaged);
  error_of();  // refused or not, it ends
  std::filesystem::remove(path);
  EXPECT_THAT(error_of(), HasSubstr("trace: no events of rank 1: expected those of 3 ranks"));
  for (const std::string& name : names_in(dir / "trace")) {
    std::filesystem::remove(dir / ("trace/" + name));
  }
  EXPECT_THAT(error_of(),
              HasSubstr("trace: no events: expected those of a run with trace.stream_mib"));
  spans.write(dir / "trace");
  EXPECT_THROW(write_merged_trace(dir / "trace", {100, 200}, dir / "merged.json"), IoError);
}

TEST(Recorder, StoresNoMoreThanItsLimit) {
  Recorder recorder;
  recorder.set_tracing(true);
  for (size_t i = 0; i < kMaxEvents + 7; ++i) recorder.add({SpanKind::compute, "add", {}, {}});
  EXPECT_EQ(recorder.take_events().size(), kMaxEvents);
  EXPECT_EQ(recorder.take_dropped(), 7);
  EXPECT_EQ(recorder.take_dropped(), 0);
  recorder.add({SpanKind::compute, "add", {}, {}});
  EXPECT_EQ(recorder.take_events().size(), 1u);
}

TEST(Recorder, SpansOfAPassHaveItsMicrobatchAndStage) {
  Recorder local;
  bind(&local);
  local.set_tracing(true);
  {
    const ScopedPass pass("forward", 3, 1);
    const ScopedSpan span(SpanKind::compute, "norm");
  }
  { const ScopedSpan span(SpanKind::compute, "add"); }
  const auto events = local.take_events();
  bind(nullptr);
  ASSERT_EQ(events.size(), 3u);
  for (const size_t i : {0, 1}) {
    EXPECT_EQ(events[i].microbatch, 3);
    EXPECT_EQ(events[i].stage, 1);
  }
  EXPECT_EQ(events[1].kind, SpanKind::pass);
  EXPECT_EQ(events[2].microbatch, -1);
}

TEST(Recorder, AShiftedClockMovesEventsAndNow) {
  Recorder recorder;
  recorder.set_tracing(true);
  recorder.shift_clock(std::chrono::seconds(5), 0);
  const TimePoint time = std::chrono::steady_clock::now();
  EXPECT_GE(recorder.now() - time, std::chrono::seconds(5));
  recorder.add({SpanKind::compute, "add", time, time});
  EXPECT_EQ(recorder.take_events().at(0).begin - time, std::chrono::seconds(5));
  recorder.shift_clock({}, 1000);
  const TimePoint later = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  recorder.add({SpanKind::compute, "add", later, later});
  const auto gained = recorder.take_events().at(0).begin - later;
  EXPECT_NEAR(double(gained.count()), 10e6, 1e5);
}

}  // namespace
}  // namespace tandem
