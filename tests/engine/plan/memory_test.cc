#include "engine/plan/cost/memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/plan/cost/activations.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

TEST(MemoryEstimate, ExpectedMemoryIsThatOfTheRankThatNeedsMost) {
  TrainConfig config;
  config.model.tie_word_embeddings = true;
  config.model.vocab = 1 << 15;
  config.train.microbatch = 1;
  config.train.dtype = "bf16";
  config.parallel.pp = 2;  // the last stage has the head, and saves its logits
  const double first = rank_activation_bytes(config, 0), last = rank_activation_bytes(config, 1);
  ASSERT_LT(first, last);
  const MemoryEstimate estimate(config);
  const RankMemory memory = estimate.largest_rank(false);
  EXPECT_EQ(memory.activations, last);
  EXPECT_GT(memory.state, estimate.training_bytes() / 2);
  EXPECT_EQ(memory.packing, 0);
  EXPECT_THAT(estimate.describe(), HasSubstr("; the rank that needs most: "));
  // The head's weight for the gradient of its input, and that of its output for the weight's.
  const auto vocab = double(config.model.vocab);
  EXPECT_EQ(estimate.largest_rank(true).packing,
            2 * vocab * double(config.model.hidden) + 2 * vocab * double(config.train.seq));
  EXPECT_EQ(MemoryEstimate(config, true).largest_rank(true).packing, 0);
}

TEST(MemoryEstimate, ScratchIsThatOfOneLayersGradients) {
  TrainConfig config;
  const ModelConfig& model = config.model;
  config.train.dtype = "bf16";
  config.train.microbatch = 1;
  const auto hidden = double(model.hidden), tokens = double(config.train.seq),
             heads = double(model.heads * model.head_dim),
             kv_heads = double(model.kv_heads * model.head_dim), ffn = double(model.ffn);
  // In f32 and rounded; rows of the embedding, twice, and of the final norm; attention and MLP:
  // input and output of their products.
  const auto scratch = [&](bool on_gpus) {
    return rank_scratch_bytes(model, config.parallel, config.train, 0, on_gpus);
  };
  const double residual = hidden * (4 + 2), ends = 3 * hidden * 2,
               attention = (2 * hidden + 2 * heads + 2 * kv_heads) * 2,
               mlp = (2 * hidden + 3 * ffn) * 2;
  EXPECT_DOUBLE_EQ(scratch(false), tokens * (residual + ends + attention + mlp));
  EXPECT_DOUBLE_EQ(scratch(true) - scratch(false), tokens * heads * 4);
  const double in_f32 = scratch(false);
  config.train.residual_gradient = "bf16";
  EXPECT_DOUBLE_EQ(in_f32 - scratch(false), tokens * hidden * 4);
}

TEST(MemoryEstimate, GpusThatAreTooSmallAreRefusedWithTheNumbers) {
  TrainConfig config;
  config.train.dtype = "bf16";
  const MemoryEstimate estimate(config, true);
  const double needed = estimate.largest_rank(false).total();
  EXPECT_NO_THROW(estimate.check_gpu(needed, "a GPU"));
  EXPECT_NO_THROW(estimate.check_gpu(0, "a GPU of unknown memory"));
  try {
    estimate.check_gpu(needed * 0.999, "a GPU");
    FAIL() << "expected an error";
  } catch (const ConfigError& error) {
    for (const char* named : {" of state", " of activations", " of scratch", " of a GPU"}) {
      EXPECT_THAT(error.what(), HasSubstr(named));
    }
  }
}

TEST(MemoryEstimate, GradientsInBf16TakeHalf) {
  TrainConfig config;
  config.train.dtype = "bf16";
  config.parallel.dp = 2;
  const auto bytes = [&] { return MemoryEstimate(config).largest_rank(false); };
  const RankMemory in_f32 = bytes();
  config.train.gradient_dtype = "bf16";
  EXPECT_EQ(MemoryEstimate(config).state(2).gradients, 2);
  EXPECT_NEAR(in_f32.state / bytes().state, (2.0 + 4 + 6) / (2 + 2 + 6), 1e-3);  // a vector's sum
  const double vectors = bytes().state;
  config.train.head_rows = 64;
  const auto& model = config.model;
  EXPECT_EQ(bytes().state - vectors,
            4 * double(model.vocab * model.hidden - std::max(model.hidden, 2 * model.head_dim)));
  EXPECT_LT(bytes().messages, in_f32.messages);
}

TEST(MemoryEstimate, ModelsTooLargeForThisMachineAreRefused) {
  TrainConfig config;
  const auto training = [&] { return MemoryEstimate(config).training_bytes(); };
  const auto snapshots = [&] { return MemoryEstimate(config).snapshot_bytes(); };
  const auto parameters = double(config.model.parameters());
  EXPECT_NO_THROW(MemoryEstimate(config).check());
  config.parallel.tp = 2;
  config.parallel.dp = 3;
  // Two ranks share a replica, three replicas the moments: 3 x (4 + 4) + 8 bytes per parameter.
  EXPECT_DOUBLE_EQ(training(), 32.0 * parameters);
  config.parallel.codec = "gradients=int4,weights=lossless";  // two residuals per replica
  EXPECT_DOUBLE_EQ(training(), 56.0 * parameters);
  config.parallel.codec = "gradients=int4,weights=int8";  // the owners' weights once
  EXPECT_DOUBLE_EQ(training(), 60.0 * parameters);
  EXPECT_EQ(snapshots(), 0);
  config.checkpoint.every_s = 60;  // twice the owners' weights of both kinds and moments; residuals
  EXPECT_DOUBLE_EQ(snapshots(), (32.0 + 3 * 8) * parameters);
  config.parallel.error_feedback = false;
  EXPECT_DOUBLE_EQ(snapshots(), 32.0 * parameters);
  EXPECT_DOUBLE_EQ(training(), 36.0 * parameters);
  config.checkpoint.snapshot_every = 1;  // three, and with copies four of each rank and two copies
  EXPECT_DOUBLE_EQ(snapshots(), 48.0 * parameters);
  config.checkpoint.peer_copy = true;
  EXPECT_DOUBLE_EQ(snapshots(), 96.0 * parameters);
  config.model.hidden = 1 << 20;
  config.model.layers = 4096;
  config.model.ffn = 1 << 22;
  try {
    MemoryEstimate(config).check();
    ADD_FAILURE() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("on tp 2 x dp 3 ranks: its weights, gradients and moments"));
    EXPECT_THAT(error.what(), HasSubstr(", snapshots for checkpoints "));
    EXPECT_THAT(error.what(), HasSubstr("expected at most this machine's"));
  }
}

TEST(MemoryEstimate, ActivationsTooLargeForThisMachineAreRefused) {
  TrainConfig config;
  const auto activations = [&] { return MemoryEstimate(config).activation_bytes(); };
  config.model = {
      .vocab = 100, .hidden = 8, .layers = 3, .heads = 2, .kv_heads = 1, .head_dim = 4, .ffn = 10};
  config.train.batch = 6;
  config.train.seq = 5;
  config.train.dtype = "f32";
  // A layer: two residuals and norms of 8 with a number each, q 8, k and v 4, gate and up 10, their
  // results 8 and 10, two heads' sums. Token and target, the first residual, the head's norm,
  // logits with three numbers, their gradient.
  const double of_layer = 4 * 8 + 2 + 8 + 2 * 4 + 2 * 10 + 8 + 10 + 2;
  const double of_token = 4.0 * (3 * of_layer + 2 + 8 + 9 + 103 + 100);
  EXPECT_DOUBLE_EQ(activations(), 30 * of_token);
  config.parallel.dp = 3;  // each rank its third
  EXPECT_DOUBLE_EQ(activations(), 30 * of_token);
  config.train.microbatch = 1;
  EXPECT_DOUBLE_EQ(activations(), 15 * of_token);
  config.train.dtype = "bf16";
  EXPECT_LT(activations(), 15 * of_token);
  EXPECT_GT(activations(), 15 * of_token / 2);
  EXPECT_NO_THROW(MemoryEstimate(config).check());
  config.train.microbatch = 0;
  config.train.batch = int64_t(3) << 40;
  try {
    MemoryEstimate(config).check();
    ADD_FAILURE() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("activations of 1099511627776 samples of 5 tokens a rank"));
    EXPECT_THAT(error.what(), HasSubstr("train.microbatch"));
  }
}

}  // namespace
}  // namespace tandem
