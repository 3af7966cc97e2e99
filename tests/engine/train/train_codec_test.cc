// Training with gradients and weights sent between data-parallel ranks in a wire format.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/formats/safetensors.h"
#include "core/system/files.h"
#include "engine/model/transformer.h"
#include "engine/parallel/sharded/sharded_optimizer.h"
#include "layouts.h"
#include "sample_text.h"
#include "tandem/error.h"
#include "temp_dir.h"
#include "tests/engine/train/run_results.h"
#include "tests/flat.h"

namespace tandem {
namespace {

using testing::HasSubstr;

std::vector<Layout> parallel_layouts() {
  std::vector<Layout> all;
  for (const Layout layout : {Layout{1, 2}, {1, 4}, {2, 2}, {2, 4}}) {
    if (!mpi_world || layout.tp * layout.dp == mpi_world->size()) all.push_back(layout);
  }
  return all;
}

std::string name_of(Layout layout) {
  return "tp" + std::to_string(layout.tp) + "dp" + std::to_string(layout.dp);
}

TEST(TrainCodec, LosslessMatchesTheUncompressedRun) {
  const TempDir dir;
  for (const Layout layout : parallel_layouts()) {
    SCOPED_TRACE(name_of(layout));
    const std::string uncompressed = dir / ("uncompressed" + name_of(layout)),
                      out = dir / name_of(layout);
    const std::vector<std::string> steps{"train.steps=8", "train.microbatch=1",
                                         "parallel.dp_bucket_mib=0.05"};
    run_layout(request_for(layout, uncompressed, steps));
    auto with = steps;
    with.push_back("parallel.codec=gradients=lossless,weights=lossless");
    run_layout(request_for(layout, out, with));
    if (!is_root()) continue;
    EXPECT_EQ(losses(out), losses(uncompressed));
    EXPECT_EQ(final_weights(out), final_weights(uncompressed));
    EXPECT_FALSE(path_exists(out + "/checkpoints/step-00000008/residuals.safetensors"));
  }
}

// Residuals and the owners' weights are in the checkpoint.
void expect_bits_of_an_uninterrupted_run(const std::vector<Layout>& layouts) {
  const TempDir dir;
  for (const Layout layout : layouts) {
    for (const std::string codec :
         {"gradients=int2:g64,weights=int8", "gradients=int4:g32", "weights=int4"}) {
      if (codec.find(',') == codec.npos && layout.tp == 1)
        continue;  // each separately: with tensor parallelism only
      SCOPED_TRACE(name_of(layout) + " " + codec);
      const std::string name = name_of(layout) + codec;
      const std::string whole = dir / ("whole" + name), out = dir / ("stopped" + name);
      const std::vector<std::string> overrides{"train.steps=3", "parallel.codec=" + codec,
                                               "parallel.dp_bucket_mib=0.05"};
      run_layout(request_for(layout, whole, overrides));
      TrainRequest request = request_for(layout, out, overrides);
      const std::atomic<bool> stop{!mpi_world || mpi_world->rank() == mpi_world->size() - 1};
      for (int step = 1; step <= 2; ++step) {  // each ends after one more step
        request.stop = &stop;
        EXPECT_EQ(run_layout(request).step, step);
        request.resume = true;
      }
      request.stop = nullptr;
      EXPECT_EQ(run_layout(request).step, 3);
      if (!is_root()) continue;
      EXPECT_EQ(losses(out), losses(whole));
      EXPECT_EQ(final_weights(out), final_weights(whole));
      const std::string at = out + "/checkpoints/step-00000003/";
      EXPECT_EQ(path_exists(at + "residuals.safetensors"), codec.starts_with("gradients"));
    }
  }
}
TEST(TrainCodec, ResumedRunHasTheBitsOfAnUninterruptedOne) {
  expect_bits_of_an_uninterrupted_run(mpi_world ? parallel_layouts()
                                                : std::vector<Layout>{{1, 2}, {2, 2}});
}
TEST(TrainCodecLong, ResumedRunHasTheBitsOfAnUninterruptedOne) {
  expect_bits_of_an_uninterrupted_run(parallel_layouts());
}

// At another layout residuals start at zero, with a note; owners' weights work with any layout.
TEST(TrainCodec, RunContinuesWithAnotherLayoutOrCodec) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  const std::string constant_rate = "optimizer.min_lr=2e-3";  // independent of the number of steps
  const auto go_on = [&](const std::string& name, Layout layout, const std::string& codec,
                         int64_t steps) {
    TrainRequest request = request_for(
        layout, dir / name,
        {"train.steps=" + std::to_string(steps), "parallel.codec=" + codec, constant_rate});
    request.resume = true;
    testing::internal::CaptureStderr();
    EXPECT_EQ(run_on_threads(request).step, steps);
    return testing::internal::GetCapturedStderr();
  };
  const std::string codec = "gradients=int4:g32,weights=int8";
  EXPECT_THAT(go_on("run", {2, 2}, codec, 4), Not(HasSubstr("residuals")));
  EXPECT_THAT(go_on("run", {2, 2}, codec, 6), Not(HasSubstr("residuals")));
  EXPECT_THAT(go_on("run", {1, 2}, codec, 8),
              HasSubstr("residuals of error feedback are of tp 2 dp 2 ep 1 with buckets of 1 MiB, "
                        "this run is tp 1 dp 2 ep 1 with buckets of 1 MiB: they start at zero"));
  EXPECT_THAT(go_on("run", {1, 4}, codec, 10), HasSubstr("start at zero"));
  EXPECT_THAT(go_on("run", {1, 4}, "none", 12), HasSubstr("are not used"));
  EXPECT_THAT(go_on("run", {2, 2}, codec, 14), HasSubstr("holds no residuals"));
  const std::vector<double> of_run = losses(dir / "run");
  run_on_threads(request_for({1, 1}, dir / "uncompressed", {"train.steps=14", constant_rate}));
  const std::vector<double> of_uncompressed = losses(dir / "uncompressed");
  for (size_t i = 0; i < of_uncompressed.size(); ++i) {
    EXPECT_NEAR(of_run[i], of_uncompressed[i], 0.01 * of_uncompressed[i]) << "step " << i + 1;
  }
}

// A run that sends weights as differences saves the owners' weights, from which an uncompressed run
// continues.
TEST(TrainCodec, UncompressedRunContinuesFromTheOwnersWeights) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  run_on_threads(
      request_for({2, 2}, dir / "run", {"train.steps=3", "parallel.codec=weights=int2"}));
  const std::string at = dir / "run/checkpoints/step-00000003/";
  const SafetensorsFile moments(at + "optimizer.safetensors");
  TrainRequest request = request_for({2, 2}, dir / "run", {"train.steps=3"});
  request.resume = true;
  std::map<std::string, std::vector<std::byte>> masters;
  for (const SafetensorsEntry& entry : moments.entries()) {
    if (entry.name.starts_with("w.")) masters[entry.name.substr(2)] = moments.data(entry);
  }
  const std::string name = "model.layers.1.mlp.down_proj.weight", norm = "model.norm.weight";
  const auto trained = [&](const std::string& tensor) {
    const SafetensorsFile file(at + "model.safetensors");
    return file.data(*file.find(tensor));
  };
  ASSERT_TRUE(masters.contains(name) && masters.contains(norm));
  EXPECT_NE(trained(name), masters[name]);
  EXPECT_EQ(trained(norm), masters[norm]);
  run_on_threads(request);  // loads, has nothing to do, saves again
  for (const auto& [tensor, bytes] : masters) EXPECT_EQ(trained(tensor), bytes) << tensor;
}

// Dense parameters and experts have separate owners, wire formats and residuals.
TEST(TrainCodec, ExpertsAreEncodedToo) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  for (const std::string codec :
       {"none", "gradients=lossless,weights=lossless", "gradients=int4:g32,weights=int8"}) {
    const auto request = [&](const std::string& out, int64_t steps) {
      return request_for({1, 4}, dir / out,
                         {"train.steps=" + std::to_string(steps), "parallel.ep=2",
                          "train.microbatch=1", "parallel.codec=" + codec, "checkpoint.every=3"},
                         "moe.toml");
    };
    run_on_threads(request(codec, 6));
    TrainRequest again = request(codec, 6);
    const std::string weights = final_weights(dir / codec);
    const std::vector<double> whole = losses(dir / codec);
    std::filesystem::remove_all(dir / codec + "/checkpoints/step-00000006");
    again.resume = true;
    run_on_threads(again);
    EXPECT_EQ(final_weights(dir / codec), weights) << codec;
    EXPECT_EQ(losses(dir / codec), whole) << codec;
    EXPECT_EQ(weights == final_weights(dir / "none"), codec.find("int") == codec.npos) << codec;
  }
}

/// Hash of parameters that must have equal bits on ranks: all parameters over the replicas; those
/// not split over tensor-parallel ranks, over all.
uint64_t hash_of(Transformer& model, bool sharded) {
  uint64_t hash = 0;
  for (const Parameter& p : model.parameter_list()) {
    if (p.sharding.over_tp() != sharded) continue;
    const LocalShard shard = local_shard(p);
    for (int64_t row = 0; row < shard.rows; ++row) {
      for (int64_t col = 0; col < shard.columns; ++col) {
        const float value =
            floats(model.parameters())[size_t(p.offset + row * shard.row_stride + col)];
        hash = hash * 0x9e3779b97f4a7c15u + std::bit_cast<uint32_t>(value) + 1;
      }
    }
  }
  return hash;
}

void expect_same_weights(Communicator& all, Layout layout, const CodecPolicy& codec) {
  const auto tp = all.split(all.rank() / layout.tp, all.rank() % layout.tp);
  const auto dp = all.split(all.rank() % layout.tp, all.rank() / layout.tp);
  const TrainConfig config = request_for(layout, "").config;
  TransformerOptions options;
  options.batch = 1, options.seq = 16;
  options.overlap.strategy = Strategy::serial;
  Transformer model(*tp, config.model, options);
  ShardedOptimizer optimizer({}, model.parameters(), model.gradients(),
                             {{*dp, {0, model.parameters().elements()}, model.parameter_list()}},
                             5000, {codec.gradients, codec.weights});
  model.initialize(1);
  optimizer.adopt_weights(model.parameters());
  std::vector<int32_t> tokens, targets;
  for (int i = 0; i < 16; ++i) tokens.push_back((31 * i + 7 * dp->rank()) % 257);
  targets.assign(tokens.rbegin(), tokens.rend());
  const uint64_t before = hash_of(model, true);
  for (int64_t step = 0; step < 4; ++step) {
    model.forward(tokens, targets);
    model.backward(1.0f / 64, [&](FlatRange range) { optimizer.ready(range); });
    optimizer.reduce();
    optimizer.update(AdamStep::make(config.optimizer, step, 0.01, 0));
    optimizer.await_all();
    model.parameters_changed();
    dp->require_same("sharded parameters", std::to_string(hash_of(model, true)));
    all.require_same("replicated parameters", std::to_string(hash_of(model, false)));
  }
  EXPECT_NE(hash_of(model, true), before);
}

TEST(TrainCodec, AllRanksHoldTheSameBits) {
  for (const Layout layout : parallel_layouts()) {
    for (const char* text :
         {"gradients=int4:g32", "gradients=int2,weights=int4", "gradients=lossless,weights=int8"}) {
      SCOPED_TRACE(name_of(layout) + " " + text);
      const CodecPolicy codec = CodecPolicy::parse(text);
      if (mpi_world) {
        expect_same_weights(*mpi_world, layout, codec);
        continue;
      }
      WorldOptions options;
      options.ranks = layout.tp * layout.dp;
      run_threads(options, [&](Communicator& all) { expect_same_weights(all, layout, codec); });
    }
  }
}

TEST(TrainCodec, BytesOfAStepAreReported) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  const auto bytes_of = [&](const std::string& codec) {
    run_on_threads(request_for({1, 4}, dir / codec, {"train.steps=2", "parallel.codec=" + codec}));
    const auto steps = steps_of(dir / codec);
    EXPECT_EQ(steps.at(0).at("weight_bytes"), 0) << "before the ranks' times";
    const auto& step = steps.at(1);
    return std::pair(step.at("gradient_bytes").get<double>(),
                     step.at("weight_bytes").get<double>());
  };
  const auto uncompressed = bytes_of("none");
  EXPECT_EQ(uncompressed.first, uncompressed.second);
  const auto low = bytes_of("gradients=int4:g32,weights=int8");
  // Norms are uncompressed, and segments are whole blocks.
  EXPECT_GT(low.first, uncompressed.first * 4.5 / 32);
  EXPECT_LT(low.first, uncompressed.first * 4.8 / 32);
  EXPECT_GT(low.second, uncompressed.second * 8.125 / 32);
  EXPECT_LT(low.second, uncompressed.second * 8.5 / 32);
  const auto lossless = bytes_of("gradients=lossless,weights=lossless");
  EXPECT_LT(lossless.first, 0.9 * uncompressed.first);
  EXPECT_LT(lossless.second, 0.9 * uncompressed.second);
  run_on_threads(request_for({2, 1}, dir / "one", {"train.steps=1"}));
  EXPECT_THAT(read_file(dir / "one/metrics.jsonl"), Not(HasSubstr("gradient_bytes")));
}

// Measured: 0.08 % for int4 and 0.0006 % for int8. int2, with 0.85 %, shows that the bound is not
// met by every format.
TEST(TrainCodecLong, Int4WithErrorFeedbackReachesTheUncompressedLoss) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  write_bytes(dir / "text", sample_text());
  const auto end_of = [&](const std::string& codec) {
    run_on_threads(
        request_for({1, 2}, dir / codec,
                    {"train.steps=200", "optimizer.lr=1e-3",
                     "data.paths=[\"" + dir / "text" + "\"]", "parallel.codec=" + codec}));
    const std::vector<double> all = losses(dir / codec);
    EXPECT_LT(all.back(), 0.65 * all.front());
    return std::accumulate(all.end() - 20, all.end(), 0.0) / 20;
  };
  const double uncompressed = end_of("none");
  const auto rise = [&](const char* codec) {
    const double percent = 100 * (end_of(codec) / uncompressed - 1);
    RecordProperty(codec, std::to_string(percent));
    std::cout << codec << ": " << percent << " % over the plain run's " << uncompressed << "\n";
    return percent;
  };
  EXPECT_LE(std::abs(rise("gradients=int4")), 0.5);
  EXPECT_LE(std::abs(rise("gradients=int8")), 0.05);
  EXPECT_GE(std::abs(rise("gradients=int2")), 0.5);
}

TEST(TrainCodec, WithoutDataParallelItIsRefused) {
  for (const std::string codec : {"gradients=int4", "weights=lossless"}) {
    try {
      check_config(request_for({2, 1}, "", {"parallel.codec=" + codec}).config);
      ADD_FAILURE() << "accepted " << codec;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("parallel.codec: codec '" + codec + "': one data-parallel rank"));
    }
  }
}

TEST(TrainCodec, RanksWithDifferentCodecsAreNamed) {
  if (mpi_world) GTEST_SKIP() << "tests/engine/train/command/ranks_differ_test.sh";
  const TempDir dir;
  std::atomic<int> refusals{0};
  const TrainRequest request =
      request_for({1, 2}, dir / "run", {"train.steps=2", "parallel.codec=gradients=int4"});
  TrainRequest other = request;
  other.config.parallel.codec = "gradients=int8";
  const Corpus corpus(request.config.data.paths, request.config.data.val_fraction);
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    try {
      train(comm, comm.rank() == 0 ? request : other, corpus);
    } catch (const Mismatch& error) {
      EXPECT_THAT(error.what(), HasSubstr("codec = 'gradients=int4'"));
      EXPECT_THAT(error.what(), HasSubstr("codec = 'gradients=int8'"));
      ++refusals;
    }
  });
  EXPECT_EQ(refusals, 2);
}

}  // namespace
}  // namespace tandem
