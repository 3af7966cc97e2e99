// Pipeline parallel runs: every layout and schedule has the bits of one stage with the same
// microbatches.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>
#include <vector>

#include "core/system/files.h"
#include "engine/parallel/pipeline.h"
#include "layouts.h"
#include "sample_text.h"
#include "schedule/pipeline.h"
#include "tandem/error.h"
#include "temp_dir.h"
#include "tests/engine/train/run_results.h"

namespace tandem {
namespace {

using Overrides = std::vector<std::string>;

struct PipelineCase {
  std::string config;
  int tp, dp;
  int64_t pp;
  Overrides overrides;
};

TrainRequest pipeline_request(const PipelineCase& c, int64_t pp, const std::string& out) {
  Overrides overrides{"train.steps=3", "train.batch=8",   "train.microbatch=1",
                      "train.seq=16",  "train.dtype=f32", "parallel.strategy=serial"};
  overrides.insert(overrides.end(), c.overrides.begin(), c.overrides.end());
  TrainRequest request = request_for({c.tp, c.dp}, out, overrides, c.config);
  request.config.parallel.pp = pp;
  if (pp == 1) {
    request.config.parallel.virtual_stages = 1;
    request.config.parallel.layers_per_stage.clear();
  }
  return request;
}

/// Whole tensors of the last checkpoint and losses and norms of all steps.
struct RunBits {
  std::string model, optimizer;
  std::vector<double> losses, norms;
  bool operator==(const RunBits&) const = default;
};

RunBits read_bits(const std::string& out, const TrainEnd& end) {
  return {read_file(end.checkpoint + "/model.safetensors"),
          read_file(end.checkpoint + "/optimizer.safetensors"), values_of(out, "loss"),
          values_of(out, "grad_norm")};
}

void expect_same_bits(const PipelineCase& c) {
  SCOPED_TRACE(c.config + " tp " + std::to_string(c.tp) + " dp " + std::to_string(c.dp) + " pp " +
               std::to_string(c.pp) + (c.overrides.empty() ? "" : " " + c.overrides.front()));
  const TempDir dir;
  const TrainEnd one = run_on_threads(pipeline_request(c, 1, dir / "one"));
  const TrainEnd stages = run_on_threads(pipeline_request(c, c.pp, dir / "stages"));
  const RunBits expected = read_bits(dir / "one", one), found = read_bits(dir / "stages", stages);
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.norms, expected.norms);
  EXPECT_TRUE(found.model == expected.model) << "weights";
  EXPECT_TRUE(found.optimizer == expected.optimizer) << "moments";
}

const std::string kFourLayers = "model.layers=4", kUntied = "model.tie_word_embeddings=false";

TEST(TrainPipeline, StagesHaveTheBitsOfOne) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const PipelineCase cases[] = {
      {"tiny.toml", 1, 1, 3, {"model.layers=5", "train.batch=6", "train.microbatch=2"}},
      {"tiny.toml", 2, 2, 2, {"train.dtype=bf16"}},
      {"tiny.toml", 1, 1, 2, {"train.dtype=fp8", "parallel.schedule=zb-h1"}},
      {"tiny.toml", 1, 2, 2, {"parallel.codec=gradients=int4:g32,weights=int8", kUntied}},
      {"tiny.toml", 1, 1, 2, {"train.microbatch=0"}},
  };
  for (const PipelineCase& c : cases) expect_same_bits(c);
}
TEST(TrainPipelineLong, StagesHaveTheBitsOfOne) {
  const PipelineCase cases[] = {
      {"tiny.toml", 1, 1, 2, {}},
      {"tiny.toml", 1, 1, 2, {kUntied}},
      {"tiny.toml", 1, 1, 4, {kFourLayers, "parallel.schedule=gpipe"}},
      {"tiny.toml", 2, 1, 2, {"train.microbatch=2"}},
      {"tiny.toml", 1, 2, 2, {"parallel.dp_bucket_mib=0.05"}},
      {"tiny.toml", 2, 1, 2, {"train.dtype=fp8"}},
      {"tiny.toml", 1, 2, 2, {"model.parallel_block=true", kUntied}},
      {"moe.toml", 1, 1, 2, {kFourLayers, "train.steps=6"}},
      {"moe.toml", 1, 2, 2, {"model.moe_layer_freq=2", kFourLayers}},
      {"moe.toml", 1, 1, 3, {"parallel.layers_per_stage=[0, 1, 1]", "model.aux_loss_coeff=0"}},
  };
  for (const PipelineCase& c : cases) expect_same_bits(c);
}

TEST(TrainPipeline, SchedulesHaveTheBitsOfOneStage) {
  if (mpi_world) GTEST_SKIP() << "threads";
  for (const schedule::PipelineKind kind : schedule::pipeline_kinds()) {
    const Overrides overrides{
        "parallel.schedule=" + std::string(schedule::name_of(kind)),
        "parallel.virtual_stages=" + std::to_string(schedule::min_chunks(kind)), kFourLayers,
        "train.steps=2"};
    expect_same_bits({"tiny.toml", 1, 1, 2, overrides});
    if (schedule::min_chunks(kind) == 1) continue;
    expect_same_bits({"moe.toml", 1, 2, 2, overrides});
  }
}

TEST(TrainPipeline, StagesOfUnequalLayersAndBareEndsHaveTheBitsOfOne) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const PipelineCase cases[] = {
      {"tiny.toml", 1, 1, 2, {"parallel.layers_per_stage=[2, 0]"}},
      {"tiny.toml", 1, 1, 2, {"parallel.layers_per_stage=[0, 2]", kUntied}},
      {"tiny.toml", 1, 2, 3, {"parallel.layers_per_stage=[0, 2, 0]", "train.batch=12"}},
      {"tiny.toml", 1, 1, 3, {"parallel.layers_per_stage=[1, 0, 1]", kUntied}},
      {"tiny.toml", 1, 1, 4, {"parallel.layers_per_stage=[1, 2, 1, 1]", "model.layers=5"}},
  };
  for (const PipelineCase& c : cases) expect_same_bits(c);
}

TEST(TrainPipeline, StagesOfExpertsHaveTheBitsOfOne) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const PipelineCase cases[] = {
      {"moe.toml", 1, 2, 2, {"parallel.ep=2", "train.aux_loss_scope=step"}},
      {"moe.toml", 2, 2, 2, {"parallel.ep=2", "model.router_bias_update_rate=0.01"}},
  };
  for (const PipelineCase& c : cases) expect_same_bits(c);
}

// Messages that take longer than passes are sent from memory that no later pass overwrites, nor one
// of the forward passes that count the experts.
TEST(TrainPipeline, SlowLinksKeepTheBits) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const std::string slow = "parallel.link=1MB/s,1us";
  const PipelineCase cases[] = {
      {"moe.toml", 1, 1, 2, {slow, "train.aux_loss_scope=step"}},
      {"tiny.toml",
       1,
       1,
       2,
       {slow, kFourLayers, "parallel.schedule=zb-v", "parallel.virtual_stages=2"}},
  };
  for (const PipelineCase& c : cases) expect_same_bits(c);
}

TEST(TrainPipeline, CheckpointsResumeWithOtherStages) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const PipelineCase c{"tiny.toml", 1, 2, 2, {"train.steps=4"}};
  const TempDir dir;
  const TrainEnd whole = run_on_threads(pipeline_request(c, 1, dir / "whole"));
  const RunBits expected = read_bits(dir / "whole", whole);
  for (const auto& [first, second] : {std::pair<int64_t, int64_t>{1, 2}, {2, 1}, {2, 2}}) {
    const std::string out = dir / (std::to_string(first) + "-" + std::to_string(second));
    std::atomic<bool> stop = false;
    TrainRequest request = pipeline_request(c, first, out);
    request.stop = &stop;
    request.before_step = [&](int64_t step) { stop = step == 1; };
    EXPECT_TRUE(run_on_threads(request).stopped);
    request = pipeline_request(c, second, out);
    request.resume = true;
    const TrainEnd end = run_on_threads(request);
    EXPECT_TRUE(read_bits(out, end) == expected) << "pp " << first << ", then " << second;
  }
}

TEST(TrainPipeline, ValidationIsThatOfOneStage) {
  if (mpi_world) GTEST_SKIP() << "threads";
  for (const std::string config : {"tiny.toml", "moe.toml"}) {
    const PipelineCase c{
        config,
        2,
        1,
        2,
        {"train.validate_every=3", "train.validate_bytes=4000", "data.val_fraction=0.4"}};
    const TempDir dir;
    std::vector<double> losses;
    for (const int64_t pp : {1, 2}) {
      const std::string out = dir / std::to_string(pp);
      run_on_threads(pipeline_request(c, pp, out));
      const std::string text = read_file(out + "/metrics.jsonl");
      const auto last = text.rfind('\n', text.size() - 2) + 1;
      losses.push_back(nlohmann::json::parse(text.substr(last)).at("validation_loss"));
    }
    EXPECT_NEAR(losses[1], losses[0], 1e-12);
  }
}

// Stage 1 of two has to wait for stage 0's first microbatch, and the other way at the end.
TEST(TrainPipeline, BubbleIsMeasured) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const TempDir dir;
  run_on_threads(pipeline_request({"tiny.toml", 1, 1, 2, {"train.microbatch=0"}}, 2, dir / "run"));
  // A rank whose processor another program takes computes for longer, and so waits for a smaller
  // share of that step: the largest of the steps is compared.
  double largest = 0;
  for (const double bubble : values_of(dir / "run", "bubble")) {
    EXPECT_GE(bubble, 0);
    EXPECT_LT(bubble, 1);
    largest = std::max(largest, bubble);
  }
  EXPECT_GT(largest, 0.2);  // with one microbatch only one stage works at a time
}

Tensor matrix(std::vector<float>& values, int64_t rows) {
  return Tensor::of(std::span(values), {rows, int64_t(values.size()) / rows});
}

// A link copies 32 MiB for much longer than it takes to destroy the sender.
TEST(TrainPipeline, DestroyedLinksHaveDeliveredTheirMessages) {
  if (mpi_world) GTEST_SKIP() << "threads";
  std::vector<float> values(size_t{8} << 20, 77);
  const Tensor message = matrix(values, 1024);
  const WorldOptions options{.ranks = 2, .link = EmulatedLink{1e10, 0}};
  run_threads(options, [&](Communicator& world) {
    StageLinks links(world, {}, {{0, 1, 1, "pp_activations"}}, message, {});
    if (world.rank() == 0) return links.send(0, 0, message);
    EXPECT_EQ(std::memcmp(links.receive(0, 0).data(), message.data(), message.bytes()), 0);
  });
}

// Each message is received in the memory of its slot, which a later one may overwrite only when it
// is acknowledged.
TEST(TrainPipeline, ReceivedMessagesKeepTheirMemoryUntilAcknowledged) {
  if (mpi_world) GTEST_SKIP() << "threads";
  constexpr int kSlots = 2, kMessages = 7;
  run_threads({.ranks = 2}, [](Communicator& world) {
    std::vector<std::vector<float>> values(kMessages, std::vector<float>(12));
    for (int i = 0; i < kMessages; ++i) std::ranges::fill(values[size_t(i)], float(i + 1));
    const auto message = [&](int i) { return matrix(values[size_t(i)], 3); };
    StageLinks links(world, {}, {{0, 1, kSlots, "pp_activations", false}}, message(0), {});
    if (world.rank() == 0) {
      for (int i = 0; i < kMessages; ++i) links.send(0, uint64_t(i), message(i));
      return;
    }
    std::vector<Tensor> received;
    for (int i = 0; i < kMessages; ++i) {
      received.push_back(links.receive(0, uint64_t(i)));
      if (i >= kSlots) {
        EXPECT_EQ(received[size_t(i)].data(), received[size_t(i - kSlots)].data());
      }
      if (i == 0) continue;  // acknowledged one message late
      EXPECT_EQ(received[size_t(i - 1)].as<float>()[11], float(i)) << i;
      links.acknowledge(0, uint64_t(i - 1));
    }
  });
}

TEST(TrainPipeline, MessagesInAWireFormatDecodeToWhatWasEncoded) {
  if (mpi_world) GTEST_SKIP() << "threads";
  for (const char* format : {"int8", "int4:g32", "e4m3", "mxfp8", "lossless"}) {
    const Wire wire = Wire::parse(format);
    run_threads({.ranks = 2}, [&](Communicator& world) {
      std::vector<float> values(3 * 300);
      for (size_t i = 0; i < values.size(); ++i) values[i] = float(i) * 0.37f - 100;
      const Tensor message = matrix(values, 3);
      StageLinks links(world, {}, {{0, 1, 2, "pp_activations", false}}, message, wire);
      std::vector<std::byte> encoded(wire.bytes(message.elements(), DType::f32));
      const size_t bytes = encode(wire, message, encoded);
      if (world.rank() == 0) {
        links.send(0, 0, message);
        EXPECT_EQ(links.sent_bytes(), bytes) << format;
        return;
      }
      std::vector<float> expected(values.size());
      decode(wire, encoded, matrix(expected, 3));
      EXPECT_EQ(std::memcmp(links.receive(0, 0).data(), expected.data(), message.bytes()), 0)
          << format;
    });
  }
}

// An encoded residual stream moves the loss a little, and fewer bytes are sent.
TEST(TrainPipeline, WireFormatsOfStagesKeepTheLoss) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const auto run = [](const char* codec, const char* schedule) {
    const TempDir dir;
    run_on_threads(
        pipeline_request({"tiny.toml",
                          1,
                          1,
                          2,
                          {std::string("parallel.codec=") + codec,
                           std::string("parallel.schedule=") + schedule, "train.steps=6"}},
                         2, dir / "run"));
    return std::pair(values_of(dir / "run", "loss"), values_of(dir / "run", "stage_bytes"));
  };
  for (const char* schedule : {"1f1b", "zb-h1"}) {
    const auto [exact, exact_bytes] = run("none", schedule);
    const auto [loss, bytes] = run("stages=int8", schedule);
    EXPECT_NE(loss, exact);
    for (size_t i = 0; i < exact.size(); ++i) {
      EXPECT_NEAR(loss[i], exact[i], 0.02 * exact[i]) << schedule << " step " << i + 1;
      // 8 microbatches of 16 rows of 64 in f32: there, back, and the gradients of lookups
      EXPECT_EQ(exact_bytes[i], 3 * 8 * 16 * 64 * 4) << i;
      EXPECT_LT(bytes[i], 0.27 * exact_bytes[i]);
    }
  }
}

TEST(TrainPipeline, LostRankIsNamedByTheOthers) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const TempDir dir;
  TrainRequest request = pipeline_request({"tiny.toml", 1, 2, 2, {}}, 2, dir / "run");
  const Corpus corpus(request.config.data.paths, request.config.data.val_fraction);
  WorldOptions options{.ranks = 4, .deadline_s = 1};
  std::atomic<int> named = 0;
  EXPECT_THROW(run_threads(options,
                           [&](Communicator& world) {
                             TrainRequest of_rank = request;
                             if (world.rank() == 3) {  // late, longer than the deadline
                               of_rank.before_step = [](int64_t step) {
                                 if (step == 1)
                                   std::this_thread::sleep_for(std::chrono::seconds(3));
                               };
                             }
                             try {
                               train(world, of_rank, corpus);
                             } catch (const Timeout& error) {
                               named += std::string(error.what()).find("rank") != std::string::npos;
                               throw;
                             }
                           }),
               Timeout);
  EXPECT_GE(named, 1);
}

TEST(TrainPipeline, ProcessesHaveTheBitsOfThreads) {
  if (!mpi_world) GTEST_SKIP() << "processes";
  const TempDir dir;
  const int dp = mpi_world->size() / 2;
  const PipelineCase c{"tiny.toml", 1, dp, 2, {}};
  const TrainEnd end = run_layout(pipeline_request(c, 2, dir / "processes"));
  if (!is_root()) return;
  const TrainEnd one = run_on_threads(pipeline_request(c, 1, dir / "one"));
  EXPECT_TRUE(read_bits(dir / "processes", end) == read_bits(dir / "one", one));
}

}  // namespace
}  // namespace tandem
