// One training run on every layout: on threads, or under mpirun on its processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "core/formats/safetensors.h"
#include "core/system/files.h"
#include "engine/checkpoint/run/run_lock.h"
#include "engine/eval/evaluate.h"
#include "engine/model/pretrained.h"
#include "engine/parallel/dims.h"
#include "engine/plan/codecs/auto_dtype.h"
#include "engine/train/step_exchange.h"
#include "engine/train/trace_steps.h"
#include "engine/train/trainer.h"
#include "layouts.h"
#include "observe/recorder.h"
#include "sample_text.h"
#include "tandem/error.h"
#include "temp_dir.h"
#include "tests/engine/train/run_results.h"
#include "tests/flat.h"

namespace tandem {
namespace {

void expect_losses_of_one_process(const std::vector<Layout>& layouts) {
  const TempDir dir;
  std::vector<double> reference;
  if (is_root()) {
    run_on_threads(request_for({1, 1}, dir / "one"));
    reference = losses(dir / "one");
    ASSERT_EQ(reference.size(), 50u);
    EXPECT_LT(reference.back(), 0.75 * reference.front());
  }
  for (const Layout layout : layouts) {
    SCOPED_TRACE(std::to_string(layout.tp) + " x " + std::to_string(layout.dp));
    const std::string out = dir / ("tp" + std::to_string(layout.tp) + std::to_string(layout.dp));
    run_layout(request_for(layout, out));
    if (is_root()) expect_close(losses(out), reference);
  }
}
TEST(TrainLayouts, FirstFiftyLossesAgreeWithOneProcess) {
  expect_losses_of_one_process(mpi_world ? layouts() : std::vector<Layout>{{2, 1}, {2, 2}});
}
TEST(TrainLayoutsLong, FirstFiftyLossesAgreeWithOneProcess) {
  expect_losses_of_one_process(layouts());
}

// `eval` reports the same for these weights, from any layout, and validation does not change the
// training.
TEST(TrainLayouts, ValidationMatchesEvalAndChangesNothing) {
  const TempDir dir;
  std::vector<std::string> overrides{"train.steps=6", "data.val_fraction=0.4"};
  const auto weights = [](const std::string& out) {
    return read_file(out + "/final/model.safetensors");
  };
  for (const Layout layout : layouts()) {
    if (!mpi_world && (layout.tp != 2 || layout.dp != 2)) continue;
    SCOPED_TRACE(std::to_string(layout.tp) + " x " + std::to_string(layout.dp));
    const std::string name = std::to_string(layout.tp) + std::to_string(layout.dp);
    run_layout(request_for(layout, dir / ("uncompressed" + name), overrides));
    auto with = overrides;
    with.push_back("train.validate_every=3");
    const std::string out = dir / ("validated" + name);
    run_layout(request_for(layout, out, with));
    if (!is_root()) continue;
    EXPECT_EQ(weights(out), weights(dir / ("uncompressed" + name)));
    std::map<int, double> losses;
    for (const nlohmann::json& entry : steps_of(out)) {
      const auto& mfu = entry.at("mfu");  // null on a machine that was busy when it was measured
      EXPECT_TRUE(mfu.is_null() || (mfu > 0 && mfu <= 1)) << mfu;
      if (entry.contains("validation_loss")) {
        losses[entry["step"].get<int>()] = entry["validation_loss"].get<double>();
      }
    }
    ASSERT_EQ(losses.size(), 2u);
    const TrainConfig config = request_for(layout, out, overrides).config;
    const Corpus corpus(config.data.paths, config.data.val_fraction);
    run_threads({}, [&](Communicator& comm) {
      Evaluator evaluator(comm, config.model, {});
      const SafetensorsFile file(out + "/final/model.safetensors");
      load_parameters(file, evaluator.model().parameter_list(), {}, evaluator.model().parameters());
      evaluator.model().parameters_changed();
      const FileScore score = evaluator.total(corpus.held_out().files);
      EXPECT_NEAR(losses.at(6), score.nats / double(score.bytes), 1e-6);
    });
    EXPECT_LT(losses.at(6), losses.at(3));
  }
}

// With as many steps as the comparison with a prediction takes, which measures layers first. The
// bound is far above what another order of sums changes in so few steps, and below what a lost
// gradient does.
TEST(TrainLayoutsLong, GradientsInBf16KeepTheLosses) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  const std::vector<std::string> bf16{"train.dtype=bf16", "train.steps=24"};
  const std::vector<double> expected = [&] {
    run_on_threads(request_for({1, 1}, dir / "f32", bf16));
    return losses(dir / "f32");
  }();
  auto rounded = bf16;
  rounded.insert(rounded.end(), {"train.gradient_dtype=bf16", "train.residual_gradient=bf16",
                                 "train.head_rows=128"});
  for (const Layout layout : {Layout{1, 1}, Layout{2, 1}, Layout{1, 2}, Layout{2, 2}}) {
    SCOPED_TRACE(std::to_string(layout.tp) + " x " + std::to_string(layout.dp));
    const std::string name = std::to_string(layout.tp) + std::to_string(layout.dp);
    std::vector<std::string> weights;
    for (const char* again : {"a", "b"}) {
      const std::string out = dir / (name + again);
      run_on_threads(request_for(layout, out, rounded));
      weights.push_back(read_file(out + "/final/model.safetensors"));
      const std::vector<double> found = losses(out);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_NEAR(found[i], expected[i], 0.002 * expected[i]) << "step " << i + 1;
      }
    }
    EXPECT_EQ(weights[0], weights[1]);
    EXPECT_NE(weights[0], read_file(dir / "f32/final/model.safetensors"));
  }
}

TEST(TrainLayouts, MissingHeldOutFileDoesNotEndTheTraining) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  for (int i = 0; i < 20; ++i) {
    write_bytes(dir / (std::to_string(i) + ".txt"), sample_text().substr(size_t(i) * 500, 2000));
  }
  TrainRequest request = request_for({2, 2}, dir / "out",
                                     {"train.steps=3", "train.validate_every=1",
                                      "data.val_fraction=0.4", "data.paths=" + dir.path()});
  const Corpus corpus(request.config.data.paths, request.config.data.val_fraction);
  ASSERT_FALSE(corpus.held_out().files.empty());
  std::filesystem::remove(corpus.held_out().files[0]);
  testing::internal::CaptureStderr();
  run_threads({.ranks = 4},
              [&](Communicator& comm) { EXPECT_EQ(train(comm, request, corpus).step, 3); });
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::HasSubstr(
                  "warning: step 3: no validation loss: " + corpus.held_out().files[0] + ": "));
  for (const auto& step : steps_of(dir / "out")) EXPECT_FALSE(step.contains("validation_loss"));
}

TEST(TrainLayouts, ValidationCanBeStopped) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  const std::string text = sample_text();
  for (int i = 0; i < 10; ++i) {
    write_bytes(dir / (std::to_string(i) + ".txt"), text.substr(size_t(i) * 5000, 5000));
  }
  TrainRequest request = request_for(
      {1, 1}, dir / "out",
      {"train.steps=3", "train.validate_every=1", "data.val_fraction=0.5", "train.validate_bytes=0",
       "train.batch=1", "train.seq=16", "data.paths=" + dir.path()});
  run_on_threads(request);
  for (const auto& step : steps_of(dir / "out")) EXPECT_TRUE(step.contains("validation_loss"));
  const std::atomic<bool> stop{true};
  request.out = dir / "stopped";
  request.stop = &stop;
  EXPECT_TRUE(run_on_threads(request).stopped);
  ASSERT_EQ(steps_of(request.out).size(), 1u);
  EXPECT_FALSE(steps_of(request.out)[0].contains("validation_loss"));
}

void expect_equal_runs(const std::vector<Layout>& layouts) {
  const TempDir dir;
  const std::vector<std::string> short_run{"train.steps=6", "train.microbatch=2",
                                           "parallel.dp_bucket_mib=0.05"};
  for (const Layout layout : layouts) {
    std::vector<std::string> weights;
    for (const std::string run : {"a", "b"}) {
      const std::string out = dir / (run + std::to_string(layout.tp) + std::to_string(layout.dp));
      run_layout(request_for(layout, out, short_run));
      if (is_root()) weights.push_back(read_file(out + "/final/model.safetensors"));
    }
    if (!is_root()) continue;
    EXPECT_EQ(weights[0], weights[1]) << layout.tp << " x " << layout.dp;
  }
}
TEST(TrainLayouts, TwoRunsAreBitwiseEqual) {
  expect_equal_runs(mpi_world ? layouts() : std::vector<Layout>{{2, 2}});
}
TEST(TrainLayoutsLong, TwoRunsAreBitwiseEqual) {
  expect_equal_runs(layouts());
}

TEST(TrainLayouts, AccumulationAndBucketsDoNotChangeTheRun) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  run_on_threads(request_for({1, 1}, dir / "whole", {"train.steps=15"}));
  run_on_threads(
      request_for({2, 2}, dir / "parts",
                  {"train.steps=15", "train.microbatch=1", "parallel.dp_bucket_mib=0.01"}));
  expect_close(losses(dir / "parts"), losses(dir / "whole"));
}

TEST(TrainLayouts, AnotherLayoutResumesACheckpoint) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  const std::string out = dir / "run";
  const std::vector<std::string> overrides{"train.steps=30", "checkpoint.every=10",
                                           "checkpoint.keep=3"};
  run_on_threads(request_for({1, 1}, dir / "one", overrides));
  run_on_threads(request_for({4, 1}, out, overrides));
  // Stopped after step 10, then after step 20.
  for (const auto& [layout, lost] :
       {std::pair(Layout{1, 2}, "23"), {Layout{2, 2}, "23"}, {Layout{2, 1}, "3"}}) {
    for (const char digit : std::string_view(lost)) {
      std::filesystem::remove_all(out + "/checkpoints/step-000000" + digit + "0");
    }
    TrainRequest request = request_for(layout, out, overrides);
    request.resume = true;
    run_on_threads(request);
    expect_close(losses(out), losses(dir / "one"));
  }
}

void expect_stopped_runs_to_continue(const std::vector<Layout>& layouts) {
  const TempDir dir;
  for (const Layout layout : layouts) {
    const std::string name = std::to_string(layout.tp) + std::to_string(layout.dp);
    const std::string whole = dir / ("whole" + name), out = dir / ("stopped" + name);
    const TrainEnd of_whole = run_layout(request_for(layout, whole, {"train.steps=4"}));
    EXPECT_FALSE(of_whole.stopped);
    EXPECT_EQ(of_whole.step, 4);

    TrainRequest request = request_for(layout, out, {"train.steps=4"});
    // A stop request on one rank stops all.
    const std::atomic<bool> stop{!mpi_world || mpi_world->rank() == mpi_world->size() - 1};
    request.stop = &stop;
    const TrainEnd end = run_layout(request);
    EXPECT_TRUE(end.stopped);
    EXPECT_EQ(end.step, 1);
    if (is_root()) {
      EXPECT_EQ(end.checkpoint, out + "/checkpoints/step-00000001");
      EXPECT_TRUE(path_exists(end.checkpoint + "/state.json"));
      EXPECT_FALSE(path_exists(out + "/final"));
    }
    request.stop = nullptr;
    request.resume = true;
    EXPECT_FALSE(run_layout(request).stopped);
    if (!is_root()) continue;
    EXPECT_EQ(losses(out), losses(whole));
    EXPECT_EQ(read_file(out + "/final/model.safetensors"),
              read_file(whole + "/final/model.safetensors"));
    EXPECT_FALSE(path_exists(out + "/.lock"));
  }
}
TEST(TrainLayouts, StoppedRunContinuesWithTheSameBits) {
  expect_stopped_runs_to_continue(mpi_world ? layouts() : std::vector<Layout>{{2, 2}});
}
TEST(TrainLayoutsLong, StoppedRunContinuesWithTheSameBits) {
  expect_stopped_runs_to_continue(layouts());
}

TEST(TrainLayouts, OnlyOneRunAtATimeMayUseAFolder) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  const std::string out = dir / "run";
  run_on_threads(request_for({1, 1}, out, {"train.steps=1"}));
  const RunLock other(out);
  for (const bool resume : {false, true}) {
    TrainRequest request = request_for({2, 1}, out, {"train.steps=2"});
    request.resume = resume;
    try {
      run_on_threads(request);
      ADD_FAILURE() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(out + ": another run (process " +
                                                   std::to_string(::getpid()) + ")"));
    }
  }
  EXPECT_TRUE(path_exists(out + "/.lock")) << "its holder still runs";
}

TEST(TrainLayouts, TimesOfAStepAreThoseOfOneRank) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  run_on_threads(request_for({2, 1}, dir / "run", {"train.steps=6"}));
  int64_t memory = 12 * request_for({2, 1}, dir / "run").config.model.parameters();
  for (const nlohmann::json& step : steps_of(dir / "run")) {
    EXPECT_LE(step["gemm_ms"], step["compute_ms"]);
    EXPECT_FALSE(step.contains("recompute_ms"));
    EXPECT_GE(step["memory_bytes"], memory);  // weights, gradients and moments; then a peak
    memory = step["memory_bytes"];
  }
}

TEST(TrainLayouts, SentBytesByAxisAreTheMeansOfTheCounts) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  run_on_threads(request_for(
      {2, 2}, dir / "run",
      {"train.steps=2", "parallel.ep=2", "parallel.pp=2", "model.layers=4",
       "model.tie_word_embeddings=false", "train.microbatch=1", "parallel.link=100GB/s,0us"},
      "moe.toml"));
  for (const nlohmann::json& step : steps_of(dir / "run")) {
    const auto& sent = step.at("sent_bytes");
    const auto sum_of = [&](const char* axis) { return 8 * sent.at(axis).get<double>(); };
    EXPECT_EQ(sum_of("tp"), step.at("tp_bytes"));
    EXPECT_EQ(sum_of("ep"), step.at("expert_bytes"));
    EXPECT_EQ(sum_of("pp"), step.at("stage_bytes"));
    EXPECT_EQ(sum_of("dp"),
              step.at("gradient_bytes").get<double>() + step.at("weight_bytes").get<double>());
    for (const char* axis : {"tp", "ep", "dp", "pp"}) {
      EXPECT_GT(sum_of(axis), 0) << axis;
      EXPECT_GE(step.at("exposed_ms").at(axis), 0) << axis;
    }
    EXPECT_GT(step.at("exposed_ms").at("pp"), 0);
  }
}

/// Waits of 2, 3, 5, 7 and 11 ms for the axes and the step's sums; on rank 1 twice as long.
TEST(StepExchange, ExposedTimesByAxisAddUpToTheWaits) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [](Communicator& world) {
    Recorder local(world.rank());
    bind(&local);
    const auto add = [&](SpanKind kind, int ms) {
      const TimePoint begin{};
      local.add({kind, "test", begin, begin + std::chrono::milliseconds(ms)});
    };
    constexpr std::pair<Phase, int> kWaits[] = {{Phase::tp_wait, 2},
                                                {Phase::ep_wait, 3},
                                                {Phase::dp_wait, 5},
                                                {Phase::pp_wait, 7},
                                                {Phase::step_wait, 11}};
    for (const auto& [phase, ms] : kWaits) {
      const ScopedPhase of(phase);
      add(SpanKind::wait, ms * (1 + world.rank()));
    }
    add(SpanKind::compute, world.rank() == 0 ? 100 : 50);
    StepRecord record;
    record.tp_bytes = 10, record.expert_bytes = 20;
    record.state_bytes_per_parameter = world.rank() == 0 ? 16 : 12;
    exchange_step({&world}, {30, 40, 60}, Pipeline::Times{.sent_bytes = 50}, record);
    bind(nullptr);
    EXPECT_DOUBLE_EQ(record.exposed_comm_ms, 2 + 3 + 5 + 7 + 11);  // of rank 0
    const AxisMeans& exposed = record.exposed_ms;
    EXPECT_DOUBLE_EQ(exposed.tp, 3);
    EXPECT_DOUBLE_EQ(exposed.ep, 4.5);
    EXPECT_DOUBLE_EQ(exposed.dp, 7.5);
    EXPECT_DOUBLE_EQ(exposed.pp, 10.5);
    EXPECT_DOUBLE_EQ(exposed.tp + exposed.ep + exposed.dp + exposed.pp,
                     1.5 * (record.exposed_comm_ms - 11));
    const AxisMeans& sent = record.sent_bytes;
    EXPECT_EQ(2 * sent.tp, double(record.tp_bytes));
    EXPECT_EQ(2 * sent.ep, double(record.expert_bytes));
    EXPECT_EQ(2 * sent.dp, double(record.gradient_bytes + record.weight_bytes));
    EXPECT_EQ(2 * sent.pp, double(*record.stage_bytes));
    EXPECT_EQ(record.state_bytes_per_parameter, 16);
  });
}

TEST(TraceSteps, KeepsTheMedianStep) {
  EXPECT_EQ(nearest_to_median({7}), 0u);
  EXPECT_EQ(nearest_to_median({90, 10, 12, 11, 50}), 2u);
  EXPECT_EQ(nearest_to_median({1, 1, 1, 9}), 0u);
}

TEST(TrainLayouts, SavingAtAnotherLayoutKeepsEveryBit) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  const std::string out = dir / "run", name = "/checkpoints/step-00000006/";
  run_on_threads(request_for({2, 2}, out, {"train.steps=6"}));
  const std::string model = read_file(out + name + "model.safetensors");
  const std::string moments = read_file(out + name + "optimizer.safetensors");
  for (const Layout layout : {Layout{1, 1}, {4, 2}, {2, 1}}) {
    TrainRequest request = request_for(layout, out, {"train.steps=6"});
    request.resume = true;
    run_on_threads(request);  // loads, has nothing to do, saves again
    EXPECT_EQ(read_file(out + name + "model.safetensors"), model);
    EXPECT_EQ(read_file(out + name + "optimizer.safetensors"), moments);
    EXPECT_EQ(read_file(out + "/final/model.safetensors"), model);
  }
}

TEST(TrainLayouts, EmulatedLinkChangesOnlyTimes) {
  if (mpi_world) GTEST_SKIP() << "threads only";
  const TempDir dir;
  for (const std::string strategy : {"serial", "overlapped"}) {
    const std::string direct = dir / ("direct-" + strategy), link = dir / ("link-" + strategy);
    const std::string how = "parallel.strategy=" + strategy;
    run_on_threads(request_for({2, 2}, direct, {"train.steps=6", how}));
    run_on_threads(request_for({2, 2}, link, {"train.steps=6", how, "parallel.link=200MB/s,50us"}));
    EXPECT_EQ(losses(link), losses(direct));
    EXPECT_EQ(read_file(link + "/final/model.safetensors"),
              read_file(direct + "/final/model.safetensors"));
  }
}

TEST(TrainLayouts, TraceShowsComputationAndCommunicationOfEveryRank) {
  if (mpi_world) GTEST_SKIP() << "threads only";
  const TempDir dir;
  run_on_threads(
      request_for({2, 2}, dir / "run",
                  {"train.steps=6", "trace.enabled=true", "trace.steps=2", "train.recompute=full",
                   "parallel.link=200MB/s,50us", "parallel.strategy=overlapped"}));
  const auto trace = nlohmann::json::parse(read_file(dir / "run/trace.json"));
  EXPECT_GT(trace.at("otherData").at("clock_bound_us").get<double>(), 0);
  std::map<std::pair<int, std::string>, int> spans;  // by rank and kind
  std::map<int, std::string> names;
  for (const auto& event : trace.at("traceEvents")) {
    const int rank = event.at("pid");
    if (event.at("ph") == "M" && event.at("name") == "process_name") {
      names[rank] = event.at("args").at("name");
    }
    if (event.at("ph") != "X") continue;
    EXPECT_GE(event.at("ts").get<double>(), 0);
    EXPECT_GE(event.at("dur").get<double>(), 0);
    ++spans[{rank, event.at("cat")}];
  }
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(names[rank], "rank " + std::to_string(rank));
    // Two steps of two layers, each with two GEMMs forward and four backward.
    EXPECT_GE((spans[{rank, "gemm"}]), 24) << "rank " << rank;
    for (const std::string kind : {"compute", "wait", "transfer"}) {
      EXPECT_GE((spans[{rank, kind}]), 2) << kind << " of rank " << rank;
    }
    EXPECT_EQ((spans[{rank, "recompute"}]), 2 * 2) << "rank " << rank;
  }
  EXPECT_EQ(names.size(), 4u);
  for (const nlohmann::json& step : steps_of(dir / "run")) {
    EXPECT_GT(step.at("recompute_ms"), 0);
    EXPECT_LT(step.at("recompute_ms"), step.at("step_ms"));
  }
}

TEST(TrainLayouts, AutoDtypeIsWrittenAndKept) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  run_on_threads(request_for({2, 1}, dir / "auto", {"train.steps=2", "train.dtype=auto"}));
  const auto dtype_in = [](const std::string& file) {
    return parse_config(read_file(file), file).train.dtype;
  };
  EXPECT_THAT(dtype_in(dir / "auto/config.toml"), testing::AnyOf("f32", "bf16"));
  // A measured dtype could not equal both of these.
  for (const std::string dtype : {"f32", "bf16"}) {
    const std::string out = dir / dtype;
    run_on_threads(request_for({2, 1}, out, {"train.steps=2", "train.dtype=" + dtype}));
    TrainRequest request = request_for({1, 2}, out, {"train.steps=4", "train.dtype=auto"});
    request.resume = true;
    run_on_threads(request);
    EXPECT_EQ(dtype_in(out + "/config.toml"), dtype);
    EXPECT_EQ(losses(out).size(), 4u);
  }
}

TEST(AutoDtype, Bf16IsChosenOnlyIfItSavesAFifth) {
  EXPECT_EQ(faster_dtype(10, 7.9), DType::bf16);
  EXPECT_EQ(faster_dtype(10, 8.1), DType::f32);
  EXPECT_EQ(faster_dtype(10, 30), DType::f32);
}

TEST(AutoDtype, EveryRankMakesTheSameChoice) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [](Communicator& comm) {
    TrainConfig config = load_config(TANDEM_SOURCE_DIR "/configs/tiny.toml", {});
    config.parallel.tp = 2;
    const DTypeChoice choice =
        choose_dtype(comm, config.model, config.parallel.tp,
                     microbatch_size(config.parallel, config.train) * config.train.seq);
    comm.require_same("choice", choice.describe());
    EXPECT_GT(choice.f32_ms, 0);
    EXPECT_GT(choice.bf16_ms, 0);
    EXPECT_EQ(choice.dtype, faster_dtype(choice.f32_ms, choice.bf16_ms));
  });
}

}  // namespace
}  // namespace tandem
