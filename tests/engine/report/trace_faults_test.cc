// Traces of runs with faults: clocks that are apart, drift or jump, and a slow link.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/system/files.h"
#include "engine/report/diagnosis.h"
#include "observe/trace_merge.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/temp_dir.h"
#include "tests/observe/trace_form.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

constexpr int kMicrobatches = 2;  // of a replica

/// Two stages, dp 2: ranks 0 and 1 are the first stage, 2 and 3 the second.
void run_with(const std::string& faults, const std::string& out,
              const std::vector<std::string>& overrides) {
  std::vector<std::string> all{"train.seq=16", "train.microbatch=1",
                               fmt::format("train.batch={}", 2 * kMicrobatches),
                               "parallel.strategy=serial"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  TrainRequest request = request_for({1, 2}, out, all);
  request.config.parallel.pp = 2;
  request.faults = FaultPlan(faults, "faults", 4);
  run_on_threads(request);
}

/// Form, and arrows that end before their begin by no more than the clocks' errors.
TraceForm expect_ordered(const nlohmann::json& trace) {
  const double bound = trace.at("otherData").at("clock_bound_us");
  EXPECT_GT(bound, 0);
  // Both ranks of an arrow may be off by the bound.
  EXPECT_LE(trace["otherData"].at("backward_us").get<double>(), 2 * bound);
  return check_form(trace);
}

int64_t arrows_of_stages(const TraceForm& form) {
  return std::ranges::count_if(form.arrows,
                               [](const FormArrow& a) { return a.name.starts_with("pp_"); });
}

nlohmann::json merge(const TempDir& dir, const StepRange& steps) {
  write_merged_trace(dir / "run/trace", steps, dir / "merged.json");
  return nlohmann::json::parse(read_file(dir / "merged.json"));
}

const std::string kApart = R"(
[[fault]]
step = 1
rank = 1
kind = "clock"
seconds = 3.5
[[fault]]
step = 1
rank = 2
kind = "clock"
ppm = 80
[[fault]]
step = 1
rank = 3
kind = "clock"
seconds = -40
ppm = -60
)";

TEST(TraceFaults, ArrowsOfShiftedAndDriftingClocksKeepTheirOrder) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const TempDir dir;
  run_with(kApart, dir / "run",
           {"train.steps=34", "trace.enabled=true", "trace.steps=2", "trace.stream_mib=8"});
  constexpr int64_t kOfStep = 2 * 3 * kMicrobatches;  // activations, gradients and lookups
  const auto typical = nlohmann::json::parse(read_file(dir / "run/trace.json"));
  EXPECT_LT(typical["otherData"]["clock_bound_us"].get<double>(), 3e6);
  EXPECT_EQ(arrows_of_stages(expect_ordered(typical)), 2 * kOfStep);
  const auto later = merge(dir, {17, 32});
  EXPECT_LT(later["otherData"]["clock_bound_us"].get<double>(), 3e6);
  EXPECT_EQ(arrows_of_stages(expect_ordered(later)), 16 * kOfStep);
  // The clocks were set while the first steps were recorded: their bound says so.
  const auto all = merge(dir, {});
  EXPECT_GE(all["otherData"]["clock_bound_us"].get<double>(), 39e6);
  EXPECT_EQ(all["otherData"]["step"], 1);
  EXPECT_EQ(all["otherData"]["last_step"], 34);
}

TEST(TraceFaults, TheStreamHasTheArrowsOfEveryStep) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const TempDir dir;
  run_with("", dir / "run", {"train.steps=5", "trace.stream_mib=8", "checkpoint.every=2"});
  const auto form = expect_ordered(merge(dir, {}));
  EXPECT_EQ(arrows_of_stages(form), 5 * 2 * 3 * kMicrobatches);
  const auto count = [&](const std::string& name) {
    return std::ranges::count(form.arrows, name, &FormArrow::name);
  };
  EXPECT_EQ(count("step_times"), 5 * 4);           // two axes of two ranks
  EXPECT_EQ(count("gradient_norm"), 5 * (4 + 2));  // and the terms of stages
  EXPECT_TRUE(std::ranges::any_of(
      form.slices, [](const FormSlice& slice) { return slice.kind == "checkpoint"; }));
}

TEST(TraceFaults, DoctorNamesTheSlowLink) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const TempDir dir;
  run_with("[[fault]]\nstep = 1\nrank = 0\nkind = \"slow_link\"\npeer = 2\npercent = 1900\n",
           dir / "run", {"train.steps=10", "trace.stream_mib=8", "parallel.link=1GB/s,2ms"});
  std::string first;
  for (const std::string& line : report::diagnose(dir / "run")) {
    if (line.starts_with("slow link: ") && first.empty()) first = line;
  }
  EXPECT_THAT(first, HasSubstr("slow link: rank 0 to rank 2 (PP, "));
  EXPECT_THAT(read_file(dir / "run/injected.jsonl"), HasSubstr(R"("kind":"slow_link")"));
}

TEST(TraceFaults, ASlowLinkNeedsAnEmulatedOne) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const TempDir dir;
  EXPECT_THROW(run_with("[[fault]]\nstep = 1\nrank = 0\nkind = \"slow_link\"\n", dir / "run",
                        {"train.steps=1"}),
               Unsupported);
}

}  // namespace
}  // namespace tandem
