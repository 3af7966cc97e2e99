// A Transformer's step on GPU ranks against CPU ranks: the same code, weights and batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "engine/model/transformer.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/model/harness.h"

namespace tandem::test {
namespace {

using namespace tandem::testing;

/// A small model whose GEMM operands have rows of 16 bytes on `ranks` tensor-parallel ranks.
ModelConfig gpu_model(const Variant& variant) {
  ModelConfig c = small_model(variant);
  c.vocab = 96;
  c.hidden = 64;
  c.head_dim = 16;
  c.ffn = 96;
  c.max_seq = 80;
  return c;
}

class GpuTransformer : public OnGpus {
 protected:
  Step on_gpus(const ModelConfig& config, const TransformerOptions& options) const {
    return run_on(
        [&](const auto& body) {
          run_gpus({ranks(), {}, 60, ranks_per_gpu(ranks())}, body);
        },
        config, options);
  }
};

TEST_P(GpuTransformer, GradientsMatchCpuRanksInF32) {
  for (const Variant& variant : kVariants) {
    if (variant.kv_heads % ranks() != 0) continue;
    const ModelConfig config = gpu_model(variant);
    const TransformerOptions options{.batch = 2, .seq = 72};
    const Step expected = run_on_threads(1, config, options), found = on_gpus(config, options);
    EXPECT_NEAR(found.loss, expected.loss, 2e-6 * expected.loss) << variant.name;
    for (const auto& [name, values] : expected.gradients) {
      EXPECT_LE(difference({{name, found.gradients.at(name)}}, {{name, values}}), 2e-5)
          << variant.name << " " << name;
    }
  }
}

// Bound: the error of bf16 on CPU ranks, which round at the same places.
TEST_P(GpuTransformer, ErrorInBf16IsThatOfCpuRanks) {
  for (const Variant& variant : kVariants) {
    if (variant.kv_heads % ranks() != 0) continue;
    const ModelConfig config = gpu_model(variant);
    TransformerOptions options{.batch = 2, .seq = 72};
    const Step exact = run_on_threads(1, config, options);
    options.dtype = DType::bf16;
    const Step on_cpus = run_on_threads(ranks(), config, options), found = on_gpus(config, options);
    const double error = std::abs(on_cpus.loss - exact.loss);
    EXPECT_LE(std::abs(found.loss - exact.loss), 2 * error + 1e-4 * exact.loss) << variant.name;
    for (const auto& [name, values] : exact.gradients) {
      const double of_cpus = difference({{name, on_cpus.gradients.at(name)}}, {{name, values}});
      EXPECT_LE(difference({{name, found.gradients.at(name)}}, {{name, values}}), 1.5 * of_cpus)
          << variant.name << " " << name;
    }
  }
}

// Gradients of several microbatches add up on the GPU, and each parameter is reported final once.
TEST_P(GpuTransformer, MicrobatchesAccumulate) {
  const ModelConfig config = gpu_model(kVariants[0]);
  const TransformerOptions options{.batch = 1, .seq = 40};
  run_gpus({ranks(), {}, 60, ranks_per_gpu(ranks())}, [&](Communicator& comm) {
    Transformer model(comm, config, options);
    model.initialize(5);
    std::vector<double> sum(size_t(model.gradients().elements()));
    int64_t begin = 0;  // of the parameters reported in this pass
    const auto pass = [&](uint64_t seed, const FlatRangeCallback& ready) {
      const Batch batch = make_batch(config, options.seq, seed);
      begin = int64_t(sum.size());
      model.forward(batch.tokens, batch.targets);
      model.backward(1, ready);
    };
    const auto ready = [&](FlatRange range) {
      EXPECT_EQ(range.end(), begin);
      begin = range.begin;
    };
    for (const uint64_t seed : {1, 2, 3}) {
      pass(seed, ready);
      EXPECT_EQ(begin, 0);
      const HostCopy gradients(model.exec(), model.gradients());
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += double(gradients.values()[i]);
      clear(model.exec(), model.gradients());
    }
    for (const uint64_t seed : {1, 2}) pass(seed, {});
    pass(3, ready);
    const HostCopy sums(model.exec(), model.gradients());
    const auto gradients = sums.values();
    double squares = 0, error = 0;
    for (size_t i = 0; i < sum.size(); ++i) {
      squares += sum[i] * sum[i];
      error += (double(gradients[i]) - sum[i]) * (double(gradients[i]) - sum[i]);
    }
    EXPECT_GT(squares, 0);
    EXPECT_LE(std::sqrt(error), 1e-5 * std::sqrt(squares));
  });
}

TEST_P(GpuTransformer, TwoStepsGiveTheSameBits) {
  const ModelConfig config = gpu_model(kVariants[0]);
  const TransformerOptions options{.batch = 2, .seq = 72, .dtype = DType::bf16};
  run_gpus({ranks(), {}, 60, ranks_per_gpu(ranks())}, [&](Communicator& comm) {
    Transformer model(comm, config, options);
    model.initialize(5);
    const Batch batch = make_batch(config, options.batch * options.seq);
    std::vector<float> before;
    for (int i = 0; i < 3; ++i) {
      const double loss = model.forward(batch.tokens, batch.targets);
      EXPECT_GT(loss, 0);
      model.backward(1);
      const HostCopy copied(model.exec(), model.gradients());
      const auto gradients = copied.values();
      if (i > 0) {
        EXPECT_TRUE(std::ranges::equal(before, gradients));
      }
      before.assign(gradients.begin(), gradients.end());
      clear(model.exec(), model.gradients());
    }
  });
}

TEST(GpuTransformerErrors, ExpertsAreRefused) {
  ModelConfig config = gpu_model(kVariants[0]);
  config.experts = 4;
  config.top_k = 2;
  run_gpus({1, {}, 60, 1}, [&](Communicator& comm) {
    EXPECT_THROW(Transformer(comm, config, {.batch = 1, .seq = 8}), Unsupported);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuTransformer, ::testing::Values(1, 2, 4),
                         [](const auto& test) { return "gpus" + std::to_string(test.param); });

}  // namespace
}  // namespace tandem::test
