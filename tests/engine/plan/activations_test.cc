// Estimates of activation bytes against what ranks allocate, and how much recomputation saves.
#include "engine/plan/cost/activations.h"

#include <gtest/gtest.h>

#include <fmt/format.h>

#include <string>
#include <vector>

#include "engine/data/corpus.h"
#include "engine/data/sampler.h"
#include "engine/parallel/dims.h"
#include "engine/train/model_ranks.h"
#include "engine/train/step_executor.h"
#include "gemm/gemm.h"
#include "schedule/pipeline.h"
#include "tests/engine/train/sample_text.h"

namespace tandem {
namespace {

constexpr double kBound = 0.1;
const std::vector<std::string> kModes{"none", "selective", "full"};

const Corpus& corpus() {
  static const Corpus corpus(std::vector<std::string>{sample_folder()}, 0);
  return corpus;
}

struct RankBytes {
  double estimated = 0, allocated = 0;
};

/// By world rank, after a step.
std::vector<RankBytes> run_step(const TrainConfig& config) {
  WorldOptions world;
  world.ranks = ParallelDims(config.parallel).ranks();
  std::vector<RankBytes> ranks(static_cast<size_t>(world.ranks));
  run_threads(world, [&](Communicator& comm) {
    set_kernel_threads(1);
    const ParallelGroups groups(comm, ParallelDims(config.parallel), config.model.experts > 0);
    const Sampler sampler(corpus(), config.train.seq, 1);
    ModelRanks model(groups, config, {});
    StepExecutor executor(config.train, config.parallel, groups, corpus(), sampler, model);
    for (ModelChunk& chunk : model.chunks) {
      chunk.stage.initialize(1);
      chunk.optimizer.adopt_weights(chunk.stage.parameter_staging());
    }
    executor.weights_changed();
    executor.compute(0, executor.targets(0));
    const int pp_rank = groups.pp() ? groups.pp()->rank() : 0;
    ranks[size_t(comm.rank())] = {rank_activation_bytes(config, pp_rank),
                                  double(executor.activation_bytes())};
  });
  return ranks;
}

TrainConfig make_config(const std::string& model) {
  TrainConfig config;
  config.model.hidden = 64;
  config.model.layers = 8;
  config.model.heads = 4;
  config.model.kv_heads = 2;
  config.model.head_dim = 16;
  config.model.ffn = 176;
  config.model.max_seq = 32;
  config.model.tie_word_embeddings = model == "tied";
  config.model.parallel_block = model == "parallel block";
  if (model == "experts") {
    config.model.experts = 4;
    config.model.expert_ffn = 64;
    config.model.shared_ffn = 32;
    config.model.moe_layer_freq = 2;
    config.model.shared_expert_gate = true;
    config.model.qk_norm = true;
  }
  config.train.batch = 16;
  config.train.microbatch = 1;
  config.train.seq = 32;
  config.train.dtype = "f32";
  config.parallel.strategy = "serial";
  config.data.paths = {sample_folder()};
  return config;
}

struct Case {
  std::string model, dtype;
  int64_t tp, dp, ep, pp;
  std::string schedule;
};
std::vector<Case> cases() {
  return {{"dense", "f32", 1, 1, 1, 1, "1f1b"},
          {"tied", "bf16", 2, 1, 1, 2, "1f1b"},
          {"tied", "f32", 1, 1, 1, 2, "zb-v"},
          {"dense", "bf16", 1, 1, 1, 4, "zb-h1"},
          {"experts", "f32", 1, 2, 2, 2, "1f1b"},
          {"experts", "bf16", 2, 1, 1, 2, "zb-h1"},
          {"dense", "f32", 1, 1, 1, 2, "gpipe"},
          {"parallel block", "f32", 2, 1, 1, 2, "interleaved"},
          {"dense", "f32", 1, 1, 1, 2, "dualpipe-v"}};
}

TEST(Activations, EstimateIsWithinATenthOfTheAllocation) {
  for (const Case& c : cases()) {
    TrainConfig config = make_config(c.model);
    config.train.dtype = c.dtype;
    config.parallel.tp = c.tp, config.parallel.dp = c.dp;
    config.parallel.ep = c.ep, config.parallel.pp = c.pp;
    config.parallel.schedule = c.schedule;
    if (c.pp > 1) {
      config.parallel.virtual_stages =
          schedule::min_chunks(schedule::parse_pipeline_kind(c.schedule));
    }
    std::vector<double> of_mode;
    for (const std::string& mode : kModes) {
      for (const int64_t layers : {0, 1}) {
        if (mode != "full" && layers > 0) continue;
        config.train.recompute = mode;
        config.train.recompute_layers = layers;
        check_config(config);
        double all = 0;
        for (const RankBytes& rank : run_step(config)) {
          EXPECT_NEAR(rank.estimated / rank.allocated, 1, kBound)
              << c.model << " " << c.dtype << " tp " << c.tp << " pp " << c.pp << " " << c.schedule
              << " " << mode << " " << layers;
          all += rank.allocated;
        }
        if (layers == 0) of_mode.push_back(all);
      }
    }
    fmt::print("{} {} tp {} dp {} pp {} {}: {:.0f} bytes, selective {:.2f}, full {:.2f}\n", c.model,
               c.dtype, c.tp, c.dp, c.pp, c.schedule, of_mode[0], of_mode[1] / of_mode[0],
               of_mode[2] / of_mode[0]);
    EXPECT_LT(of_mode[1], 0.95 * of_mode[0]);
    EXPECT_LT(of_mode[2], 0.65 * of_mode[0]);
  }
}

TEST(Activations, ExpertsAreCountedByWhatTheySave) {
  for (const auto& [tp, ep] : {std::pair(1, 2), {2, 1}}) {
    TrainConfig config = make_config("experts");
    config.model.hidden = 128, config.model.layers = 4;
    config.train.microbatch = 4;
    config.parallel.tp = tp, config.parallel.dp = config.parallel.ep = ep;
    std::vector<double> all;
    for (const char* save : {"sorted", "rows", "recompute"}) {
      config.train.moe_save = save;
      check_config(config);
      double bytes = 0;
      for (const RankBytes& rank : run_step(config)) {
        EXPECT_NEAR(rank.estimated / rank.allocated, 1, kBound) << save << " tp " << tp;
        bytes += rank.allocated;
      }
      all.push_back(bytes);
    }
    EXPECT_LT(all[1], 0.97 * all[0]);
    EXPECT_LT(all[2], 0.87 * all[1]);
  }
}

// Large vocabularies, so that an estimate with all logits would be far off.
TEST(Activations, LogitsByRowsAreThoseOfTheRows) {
  for (const int64_t tp : {1, 2}) {
    TrainConfig config = make_config("dense");
    config.model.vocab = 4096;
    config.parallel.tp = tp;
    config.train.batch = 2;
    for (const char* dtype : {"f32", "bf16"}) {
      config.train.dtype = dtype;
      std::vector<double> bytes;
      for (const int64_t rows : {0, 8}) {
        config.train.head_rows = rows;
        check_config(config);
        for (const RankBytes& rank : run_step(config)) {
          EXPECT_NEAR(rank.estimated / rank.allocated, 1, kBound) << dtype << " " << rows;
          if (bytes.size() <= size_t(rows > 0)) bytes.push_back(rank.allocated);
        }
      }
      // 8 of a microbatch's 32 rows; their gradient has memory of its own.
      const double of_row = 4096.0 / double(tp) * (4 + (config.train.dtype == "f32" ? 4 : 2));
      EXPECT_NEAR(bytes[0] - bytes[1], 24 * of_row, 0.01 * 24 * of_row);
    }
  }
}

/// Microbatches in flight add what they save, not what they recompute.
TEST(Activations, RecomputedMemoryDoesNotGrowWithMicrobatchesInFlight) {
  for (const std::string& mode : kModes) {
    TrainConfig config = make_config("dense");
    config.parallel.pp = 2;
    config.parallel.schedule = "gpipe";
    config.train.recompute = mode;
    std::vector<double> bytes;
    for (const int64_t microbatches : {4, 8}) {
      config.train.batch = microbatches;
      bytes.push_back(run_step(config)[0].allocated);
    }
    const double of_microbatch = (bytes[1] - bytes[0]) / 4;
    if (mode == "full") {
      // Token and target, and the residual stream before four layers and after them.
      const double of_token = 8 + 4 * 64 * 5;
      EXPECT_EQ(of_microbatch, 32 * of_token);
    }
    EXPECT_GT(bytes[0], 4 * of_microbatch - 1);
  }
}

}  // namespace
}  // namespace tandem
