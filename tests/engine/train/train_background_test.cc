// Checkpoints that are written while training continues.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/train/trainer.h"
#include "layouts.h"
#include "tandem/error.h"
#include "temp_dir.h"
#include "tests/engine/train/run_results.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

struct Case {
  std::string name;
  Layout layout;
  std::vector<std::string> overrides;
  std::string config = "tiny.toml";
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

const std::vector<std::string> kSmall{"train.steps=6", "train.batch=8", "train.seq=16",
                                      "model.layers=2", "parallel.dp_bucket_mib=0.05"};

std::vector<Case> cases() {
  return {{"f32_tp2_dp2", {2, 2}, {}},
          {"bf16_dp2", {1, 2}, {"train.dtype=bf16"}},
          {"fp8_dp2", {1, 2}, {"train.dtype=fp8"}},
          {"pp2_dp2", {1, 2}, {"parallel.pp=2", "train.microbatch=2"}},
          {"residuals_and_masters", {1, 2}, {"parallel.codec=gradients=int4:g32,weights=int8"}},
          {"experts", {1, 4}, {"parallel.ep=2", "train.microbatch=1"}, "moe.toml"}};
}

std::vector<Case> more_cases() {
  return {{"one_rank", {1, 1}, {}},
          {"bf16_tp2_dp2", {2, 2}, {"train.dtype=bf16"}},
          {"bf16_pp2_tp2", {2, 1}, {"train.dtype=bf16", "parallel.pp=2", "train.microbatch=2"}},
          {"interleaved",
           {1, 2},
           {"parallel.pp=2", "parallel.virtual_stages=2", "parallel.schedule=interleaved",
            "train.microbatch=1", "model.layers=4"}},
          {"bf16_residuals",
           {2, 2},
           {"train.dtype=bf16", "parallel.codec=gradients=int2:g64,weights=int4"}},
          {"lamb", {2, 2}, {"optimizer.name=lamb"}},
          {"experts_tp2",
           {2, 2},
           {"parallel.ep=2", "train.microbatch=1", "train.dtype=bf16"},
           "moe.toml"},
          {"expert_residuals",
           {1, 4},
           {"parallel.ep=2", "train.microbatch=1", "parallel.codec=gradients=int4:g32"},
           "moe.toml"}};
}

TrainRequest request(const Case& c, const std::string& out,
                     const std::vector<std::string>& overrides) {
  std::vector<std::string> all = kSmall;
  all.insert(all.end(), c.overrides.begin(), c.overrides.end());
  all.insert(all.end(), overrides.begin(), overrides.end());
  return request_for(c.layout, out, all, c.config);
}

class TrainBackground : public testing::TestWithParam<Case> {};

// From every checkpoint that was written during training, the run ends with the bits of a run that
// writes none.
TEST_P(TrainBackground, ResumedRunHasTheBitsOfAnUninterruptedOne) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  const std::string whole = dir / "whole", saved = dir / "saved";
  run_on_threads(request(GetParam(), whole, {}));
  run_on_threads(request(GetParam(), saved, {"checkpoint.every=1", "checkpoint.keep=9"}));
  const std::string expected = final_weights(whole);
  EXPECT_TRUE(final_weights(saved) == expected);
  const std::vector<std::string> checkpoints = list_checkpoints(saved);
  ASSERT_GE(checkpoints.size(), 2u);  // the last, and one before
  for (const std::string& path : checkpoints) {
    EXPECT_NO_THROW(verify_checkpoint(path));
    const std::string resumed = dir / "resumed";
    fs::remove_all(resumed);
    fs::create_directories(resumed + "/checkpoints");
    fs::copy(path, resumed + "/checkpoints/" + fs::path(path).filename().string(),
             fs::copy_options::recursive);
    TrainRequest again = request(GetParam(), resumed, {});
    again.resume = true;
    EXPECT_EQ(run_on_threads(again).step, 6);
    EXPECT_TRUE(final_weights(resumed) == expected) << path;
  }
}

INSTANTIATE_TEST_SUITE_P(Some, TrainBackground, testing::ValuesIn(cases()),
                         [](const auto& of) { return of.param.name; });
INSTANTIATE_TEST_SUITE_P(MoreLong, TrainBackground, testing::ValuesIn(more_cases()),
                         [](const auto& of) { return of.param.name; });

// Threads, or under mpirun processes, whose writing threads exchange messages while they train.
TEST(TrainBackgroundRanks, MayBeProcesses) {
  const TempDir dir;
  for (const Layout layout : layouts()) {
    if (layout.tp * layout.dp != 2) continue;
    const Case c{"", layout, {"train.steps=20"}};
    const std::string name = std::to_string(layout.tp);
    const std::string whole = dir / ("whole" + name), saved = dir / ("saved" + name);
    run_layout(request(c, whole, {}));
    run_layout(request(c, saved, {"checkpoint.every=1", "checkpoint.keep=99"}));
    if (!is_root()) continue;
    EXPECT_TRUE(final_weights(saved) == final_weights(whole));
    for (const std::string& path : list_checkpoints(saved)) {
      EXPECT_NO_THROW(verify_checkpoint(path));
    }
    EXPECT_GE(list_checkpoints(saved).size(), 2u);
  }
}

std::vector<int64_t> saved_steps(const std::string& out) {
  std::vector<int64_t> steps;
  for (const std::string& path : list_checkpoints(out)) steps.push_back(*checkpoint_step(path));
  return steps;
}

TEST(TrainCheckpoints, AreTakenWhenTheyAreDue) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  const auto steps_of_run = [&](const std::string& name, std::vector<std::string> overrides) {
    TrainRequest run = request({"", {1, 2}, {}}, dir / name, overrides);
    run.before_step = [is_saved = run.config.checkpoint.every > 0, out = run.out](int64_t step) {
      for (int i = 0; is_saved && step == 3 && i < 6000 && saved_steps(out).empty(); ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    };
    run_on_threads(run);
    return saved_steps(run.out);
  };
  EXPECT_THAT(steps_of_run("first", {"checkpoint.first_step=true", "checkpoint.keep=9"}),
              testing::ElementsAre(6, 1));
  EXPECT_THAT(steps_of_run("rarely", {"checkpoint.every_s=1000"}), testing::ElementsAre(6));
  for (const auto& line : steps_of(dir / "rarely")) EXPECT_FALSE(line.contains("saved_step"));
  // A checkpoint that is due while one is written waits, and a later one may replace it. On a busy
  // machine it may take several runs until each write has ended two steps later.
  constexpr int kMaxRuns = 50;
  std::string every;
  for (int run = 0; run < kMaxRuns && every.empty(); ++run) {
    const std::string name = "every" + std::to_string(run);
    const auto steps = steps_of_run(name, {"checkpoint.every=2", "checkpoint.keep=9"});
    ASSERT_THAT(steps, testing::AnyOf(testing::ElementsAre(6, 4, 2), testing::ElementsAre(6, 2)));
    if (steps.size() == 3) every = name;
  }
  ASSERT_FALSE(every.empty()) << "step 4 is never saved";
  for (const auto& line : steps_of(dir / every)) {
    EXPECT_GE(line.at("checkpoint_ms").get<double>(), 0);
    const int64_t step = line["step"];
    EXPECT_GE(line.value("saved_step", 0), step == 6 ? 2 : 0);
    EXPECT_LT(line.value("saved_step", 0), std::max<int64_t>(step - 1, 1));  // only once on disk
  }
  size_t saved = 0;
  for (int run = 0; run < kMaxRuns && saved < 3; ++run) {
    const auto steps = steps_of_run("seconds" + std::to_string(run),
                                    {"checkpoint.every_s=0.001", "checkpoint.keep=9"});
    ASSERT_THAT(steps, testing::Contains(6));
    ASSERT_THAT(steps, testing::Contains(1));
    saved = std::max(saved, steps.size());
  }
  EXPECT_GE(saved, 3u) << "no step between the first and the last is saved";
}

// While every rank's thread writes, one rank fails: its error is that of the run, and no thread
// waits for another until the deadline of a disk.
TEST(TrainCheckpoints, ErrorOfOneRankEndsTheRunAtOnce) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  for (const int64_t last : {1, 2, 5}) {
    TrainRequest failing = request({"", {2, 2}, {}}, dir / std::to_string(last),
                                   {"train.steps=1000", "checkpoint.every=1"});
    std::atomic<int> ranks{0};
    failing.before_step = [&](int64_t step) {
      if (step == last && ++ranks == 3) throw IoError("a rank has failed");
    };
    const auto begin = std::chrono::steady_clock::now();
    try {
      run_on_threads(failing);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "a rank has failed");
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
    // Checkpoints saved before are valid.
    EXPECT_NO_THROW(newest_checkpoint(
        failing.out, [](const std::string& warning) { ADD_FAILURE() << warning; }));
  }
}

TEST(TrainCheckpoints, ModelIsExportedInBf16) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  const Case one{"", {2, 2}, {}};
  run_on_threads(request(one, dir / "f32", {}));
  run_on_threads(request(one, dir / "bf16", {"checkpoint.export_dtype=bf16"}));
  const SafetensorsFile exact(dir / "f32/final/model.safetensors"),
      rounded(dir / "bf16/final/model.safetensors");
  EXPECT_NO_THROW(rounded.verify(true));
  ASSERT_EQ(rounded.entries().size(), exact.entries().size());
  for (const SafetensorsEntry& entry : exact.entries()) {
    const SafetensorsEntry& other = rounded.require(entry.name, entry.shape);
    EXPECT_EQ(other.dtype, DType::bf16);
    std::vector<float> values(size_t(entry.elements())), found(values.size());
    exact.read_f32(entry, 0, values);
    rounded.read_f32(other, 0, found);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(found[i], BFloat16::from_float(values[i]).to_float()) << entry.name << " " << i;
    }
  }
  const auto config = nlohmann::json::parse(read_file(dir / "bf16/final/config.json"));
  EXPECT_EQ(config["torch_dtype"], "bfloat16");
  EXPECT_TRUE(read_file(dir / "f32/checkpoints/step-00000006/model.safetensors") ==
              read_file(dir / "bf16/checkpoints/step-00000006/model.safetensors"));
}

/// Bytes of all tensors of an optimizer file.
bool all_zero(const std::string& path) {
  const SafetensorsFile file(path);
  return std::ranges::all_of(file.entries(), [&](const SafetensorsEntry& entry) {
    return std::ranges::all_of(file.data(entry), [](std::byte b) { return b == std::byte{0}; });
  });
}

TEST(TrainInit, StartsFromTheWeightsOfAModel) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  run_on_threads(request({"", {2, 2}, {}}, dir / "first", {"checkpoint.export_dtype=bf16"}));
  const std::string checkpoint = checkpoint_path(dir / "first", 6);
  for (const std::string& from : {dir / "first/final", checkpoint}) {
    for (const Case& c :
         {Case{"dp2", {1, 2}, {}},
          Case{"bf16_pp2_tp2", {2, 1}, {"train.dtype=bf16", "parallel.pp=2", "train.microbatch=2"}},
          Case{"masters", {1, 2}, {"parallel.codec=weights=int8"}}}) {
      SCOPED_TRACE(c.name);
      const std::string out = dir / (c.name + std::to_string(from == checkpoint));
      TrainRequest again = request(c, out, {"checkpoint.keep=9", "model.max_seq=64"});
      again.init = from;
      run_on_threads(again);
      const std::string begin = checkpoint_path(out, 0);
      const SafetensorsFile given(from + "/model.safetensors"), taken(begin + "/model.safetensors");
      for (const SafetensorsEntry& entry : given.entries()) {
        std::vector<float> expected(size_t(entry.elements())), found(expected.size());
        given.read_f32(entry, 0, expected);
        taken.read_f32(taken.require(entry.name, entry.shape), 0, found);
        ASSERT_EQ(found, expected) << entry.name;
      }
      EXPECT_EQ(all_zero(begin + "/optimizer.safetensors"),
                c.name != "masters");  // masters are there
      // Equals a run that is resumed before its first step.
      const std::string weights = final_weights(out);
      for (const std::string& path : list_checkpoints(out)) {
        if (path != begin) fs::remove_all(path);
      }
      again.init.clear();
      again.resume = true;
      run_on_threads(again);
      EXPECT_TRUE(final_weights(out) == weights);
    }
  }
}

}  // namespace
}  // namespace tandem
