// A Transformer's step on GPU ranks against CPU ranks: the same code, weights and batch.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/exec.h"
#include "engine/model/expert_load.h"
#include "engine/model/transformer.h"
#include "tandem/collectives.h"
#include "tests/engine/model/routed_steps.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

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

/// Models whose heads `ranks` tensor-parallel ranks can divide, by name.
std::vector<std::pair<std::string, ModelConfig>> gpu_models(int ranks) {
  std::vector<std::pair<std::string, ModelConfig>> models;
  for (const Variant& variant : kVariants) {
    if (variant.kv_heads % ranks == 0) models.emplace_back(variant.name, gpu_model(variant));
  }
  const ModelConfig tied = models.front().second;
  models.emplace_back("biases", tied).second.qkv_bias = true;
  models.emplace_back("head_norms", tied).second.qk_norm = true;
  ModelConfig& all_biases = models.emplace_back("all_biases", tied).second;
  all_biases.qkv_bias = all_biases.out_bias = all_biases.mlp_bias = true;
  all_biases.no_rope_layer_interval = 2;
  all_biases.attention_multiplier = 0.2, all_biases.logits_scaling = 4;
  ModelConfig& both = models.emplace_back("biases_and_head_norms_next_to_mlp", tied).second;
  both.qkv_bias = both.qk_norm = both.parallel_block = true;
  return models;
}

struct MoeVariant {
  const char* name;
  void (*change)(ModelConfig&);
};
const MoeVariant kMoeVariants[] = {{"all_chosen",
                                    [](ModelConfig& c) {
                                      c.experts = c.top_k = 4;
                                      c.route_scale = 2;
                                    }},
                                   {"one_shared_alternating",
                                    [](ModelConfig& c) {
                                      c.top_k = 1;
                                      c.normalize_top_k = false;
                                      c.shared_ffn = 64;
                                      c.moe_layer_freq = 2;
                                    }},
                                   {"two", [](ModelConfig&) {}},
                                   {"sigmoid_bias",
                                    [](ModelConfig& c) {
                                      c.router = "sigmoid";
                                      c.router_bias_update_rate = 0.01;
                                    }},
                                   {"gated_shared", [](ModelConfig& c) {
                                      c.shared_ffn = 64;
                                      c.shared_expert_gate = c.qkv_bias = true;
                                    }}};

ModelConfig gpu_moe_model(const MoeVariant& variant = kMoeVariants[2]) {
  ModelConfig c = gpu_model(::tandem::test::kVariants[0]);
  c.experts = 8;
  c.top_k = 2;
  c.expert_ffn = 32;
  c.aux_loss_coeff = 0.05;
  variant.change(c);
  return c;
}

class GpuTransformer : public OnGpus {
 protected:
  Step on_gpus(const ModelConfig& config, const TransformerOptions& options,
               const std::vector<int32_t>& starts = {}) const {
    return run_on(
        [&](const auto& body) {
          run_gpus({ranks(), {}, 60, ranks_per_gpu(ranks())}, body);
        },
        config, options, starts);
  }
};

TEST_P(GpuTransformer, GradientsMatchCpuRanksInF32) {
  for (const auto& [model, config] : gpu_models(ranks())) {
    const TransformerOptions options{.batch = 2, .seq = 72};
    const Step expected = run_on_threads(1, config, options), found = on_gpus(config, options);
    EXPECT_NEAR(found.loss, expected.loss, 2e-6 * expected.loss) << model;
    for (const auto& [name, values] : expected.gradients) {
      EXPECT_LE(difference({{name, found.gradients.at(name)}}, {{name, values}}), 2e-5)
          << model << " " << name;
    }
  }
}

TEST_P(GpuTransformer, DocumentsMatchCpuRanksInF32) {
  ModelConfig config = gpu_model(kVariants[4]);  // has a window
  if (config.kv_heads % ranks() != 0) config.kv_heads = config.heads;
  const TransformerOptions options{.batch = 2, .seq = 72};
  std::vector<int32_t> starts;
  for (int64_t i = 0; i < options.batch * options.seq; ++i) {
    const int64_t position = i % options.seq;
    const bool begins = position == 0 || philox(5, 1, uint64_t(i))[0] % 12 == 0;
    starts.push_back(begins ? int32_t(position) : starts.back());
  }
  const Step expected = run_on_threads(1, config, options, starts),
             found = on_gpus(config, options, starts), whole = on_gpus(config, options);
  EXPECT_NEAR(found.loss, expected.loss, 2e-6 * expected.loss);
  EXPECT_GT(difference(whole.gradients, expected.gradients), 1e-2);
  for (const auto& [name, values] : expected.gradients) {
    EXPECT_LE(difference({{name, found.gradients.at(name)}}, {{name, values}}), 2e-5) << name;
  }
}

// Bound of gradients: the error of bf16 on CPU ranks. They round at the same places, but for the
// logits: each target's loss may be off by half a unit more, and these errors add up randomly.
TEST_P(GpuTransformer, ErrorInBf16IsThatOfCpuRanks) {
  for (const auto& [model, config] : gpu_models(ranks())) {
    TransformerOptions options{.batch = 2, .seq = 72};
    const Step exact = run_on_threads(1, config, options);
    options.dtype = DType::bf16;
    const Step on_cpus = run_on_threads(ranks(), config, options), found = on_gpus(config, options);
    const double error = std::abs(on_cpus.loss - exact.loss);
    const double rounded = 3 * 0x1p-9 / std::sqrt(double(options.batch * options.seq)) * exact.loss;
    EXPECT_LE(std::abs(found.loss - exact.loss), 2 * error + rounded) << model;
    for (const auto& [name, values] : exact.gradients) {
      const double of_cpus = difference({{name, on_cpus.gradients.at(name)}}, {{name, values}});
      const double factor = values.size() < 64 ? 2.5 : 1.5;  // the error of few elements varies
      EXPECT_LE(difference({{name, found.gradients.at(name)}}, {{name, values}}), factor * of_cpus)
          << model << " " << name;
    }
  }
}

TEST_P(GpuTransformer, ErrorOfGradientsInBf16IsThatOfCpuRanks) {
  for (const Variant& variant : kVariants) {
    if (variant.kv_heads % ranks() != 0) continue;
    const ModelConfig config = gpu_model(variant);
    TransformerOptions options{.batch = 2, .seq = 72};
    const Step exact = run_on_threads(1, config, options);
    options.dtype = DType::bf16;
    for (const auto& [gradients, residual, head_rows] :
         {std::tuple(DType::bf16, DType::f32, 0), std::tuple(DType::f32, DType::bf16, 0),
          std::tuple(DType::f32, DType::f32, 48), std::tuple(DType::bf16, DType::bf16, 48)}) {
      options.gradient_dtype = gradients, options.residual_gradient = residual;
      options.head_rows = head_rows;
      const std::string what =
          fmt::format("{}, gradients in {}, of the residual stream in {}, head rows {}",
                      variant.name, name_of(gradients), name_of(residual), head_rows);
      const Step on_cpus = run_on_threads(ranks(), config, options),
                 found = on_gpus(config, options), again = on_gpus(config, options);
      EXPECT_EQ(found.gradients, again.gradients) << what;
      EXPECT_EQ(found.loss, again.loss) << what;
      EXPECT_NEAR(found.loss, exact.loss, 0.01 * exact.loss) << what;
      for (const auto& [name, values] : exact.gradients) {
        const double of_cpus = difference({{name, on_cpus.gradients.at(name)}}, {{name, values}});
        EXPECT_LE(difference({{name, found.gradients.at(name)}}, {{name, values}}), 1.5 * of_cpus)
            << what << ": " << name;
      }
    }
  }
}

// CPU ranks multiply the values of the same codes: their errors are not independent of the GPUs'.
TEST_P(GpuTransformer, ErrorInFp8IsThatOfCpuRanks) {
  for (const Variant& variant : kVariants) {
    if (variant.kv_heads % ranks() != 0) continue;
    ModelConfig config = gpu_model(variant);
    config.ffn = 128;  // a multiple of 16 on each rank
    TransformerOptions options{.batch = 2, .seq = 72};
    const Step exact = run_on_threads(1, config, options);
    options.dtype = DType::bf16;
    const Step in_bf16 = run_on_threads(1, config, options);
    options.fp8 = true;
    const Step on_cpus = run_on_threads(ranks(), config, options), found = on_gpus(config, options);
    EXPECT_NEAR(found.loss, on_cpus.loss, 5e-3 * exact.loss) << variant.name;
    for (const auto& [name, values] : exact.gradients) {
      const Tensors whole{{name, values}}, of_cpus{{name, on_cpus.gradients.at(name)}},
          of_gpus{{name, found.gradients.at(name)}};
      const double error = difference(of_cpus, whole);
      EXPECT_LE(difference(of_gpus, whole), 1.5 * error) << variant.name << " " << name;
      EXPECT_LE(difference(of_gpus, of_cpus), error) << variant.name << " " << name;
      EXPECT_GT(difference(of_gpus, whole), difference({{name, in_bf16.gradients.at(name)}}, whole))
          << variant.name << " " << name;
    }
  }
}

TEST_P(GpuTransformer, ErrorOfExpertsInBf16IsThatOfCpuRanks) {
  for (const MoeVariant& variant : kMoeVariants) {
    SCOPED_TRACE(variant.name);
    const auto on_threads = [](int count) {
      return [count](const auto& body) {
        WorldOptions world;
        world.ranks = count;
        run_threads(world, body);
      };
    };
    expect_error_of_cpu_ranks(gpu_moe_model(variant),
                              {on_threads(1), on_threads(ranks()), [&](const auto& body) {
                                 run_gpus({ranks(), {}, 60, ranks_per_gpu(ranks())}, body);
                               }});
  }
}

// All experts are chosen, so that rounding changes no choice.
TEST_P(GpuTransformer, ErrorWithPaddingIsThatOfCpuRanks) {
  const ModelConfig config = gpu_moe_model(kMoeVariants[0]);
  const auto on_threads = [](int count) {
    return [count](const auto& body) {
      WorldOptions world;
      world.ranks = count;
      run_threads(world, body);
    };
  };
  const auto on_each_gpu = [&](const auto& body) {
    run_gpus({ranks(), {}, 60, ranks_per_gpu(ranks())}, body);
  };
  TransformerOptions options{.batch = 2, .seq = 72};
  for (const int64_t padding : {1, 29, 60}) {
    SCOPED_TRACE(padding);
    options.dtype = DType::f32;
    const Step exact = run_on(on_threads(1), config, options, {}, {}, padding);
    options.dtype = DType::bf16;
    const Step on_cpus = run_on(on_threads(ranks()), config, options, {}, {}, padding),
               found = run_on(on_each_gpu, config, options, {}, {}, padding);
    const auto real_rows = double(options.batch * (options.seq - padding));
    const double rounded = 3 * 0x1p-9 / std::sqrt(real_rows) * exact.loss;
    EXPECT_LE(std::abs(found.loss - exact.loss), 2 * std::abs(on_cpus.loss - exact.loss) + rounded);
    for (const auto& [name, values] : exact.gradients) {
      if (name.ends_with("correction_bias")) continue;  // no gradient
      const double of_cpus = difference({{name, on_cpus.gradients.at(name)}}, {{name, values}});
      EXPECT_LE(difference({{name, found.gradients.at(name)}}, {{name, values}}),
                2 * of_cpus + 0x1p-8)
          << name;
    }
  }
}

// Rows, auxiliary loss and biases of a step of two microbatches; few choices differ. `padding`: at
// the end of each sequence.
void expect_load_of_cpu_ranks(int ranks, int64_t padding) {
  const ModelConfig config = gpu_moe_model(kMoeVariants[3]);
  const TransformerOptions options{.batch = 2, .seq = 72, .dtype = DType::bf16};
  struct Load {
    std::vector<double> rows;
    double aux_loss = 0;
    std::vector<float> biases;
  };
  const auto step = [&](Communicator& comm) {
    set_kernel_threads(1);
    Transformer model(comm, config, options);
    model.initialize(5);
    model.begin_step(2);
    for (const uint64_t seed : {1, 2}) {
      Batch batch = make_batch(config, options.batch * options.seq, seed);
      pad(batch, options.seq, padding);
      model.forward(batch.tokens, batch.targets);
      model.backward(1);
    }
    model.share_load();
    model.adjust_router_bias();
    const HostCopy weights(model.exec(), model.parameters());
    Load load{model.expert_counts()->rows, model.aux_loss(), {}};
    for (const Parameter& p : model.parameter_list()) {
      if (!p.name.ends_with("correction_bias")) continue;
      const auto biases = weights.values().subspan(size_t(p.offset), size_t(config.experts));
      load.biases.insert(load.biases.end(), biases.begin(), biases.end());
    }
    return load;
  };
  std::mutex mutex;
  std::vector<Load> on_cpu, on_gpu;
  run_threads({}, [&](Communicator& comm) { on_cpu.push_back(step(comm)); });
  run_gpus({ranks, {}, 60, ranks_per_gpu(ranks)}, [&](Communicator& comm) {
    Load load = step(comm);
    const std::lock_guard lock(mutex);
    on_gpu.push_back(std::move(load));
  });
  for (const Load& load : on_gpu) {
    EXPECT_EQ(load.rows, on_gpu[0].rows);
    EXPECT_EQ(load.biases, on_gpu[0].biases);
    EXPECT_EQ(load.aux_loss, on_gpu[0].aux_loss);
  }
  const Load &expected = on_cpu[0], &found = on_gpu[0];
  ASSERT_EQ(found.rows.size(), expected.rows.size());
  const double all_rows = 2 * double(options.batch * (options.seq - padding));
  double sum = 0, moved = 0;
  for (size_t i = 0; i < found.rows.size(); ++i) {
    sum += found.rows[i];
    moved += std::abs(found.rows[i] - expected.rows[i]);
    const double mean = 2 * all_rows / double(config.experts);
    EXPECT_EQ(found.biases[i], found.rows[i] < mean ? 0.01f : found.rows[i] > mean ? -0.01f : 0.0f);
  }
  EXPECT_EQ(sum, 2 * 2 * all_rows);  // layers, choices
  EXPECT_LE(moved, 0.03 * sum);
  EXPECT_NEAR(found.aux_loss, expected.aux_loss, 0.01 * expected.aux_loss);
}

TEST_P(GpuTransformer, ExpertLoadIsThatOfCpuRanks) {
  for (const int64_t padding : {0, 29, 72}) {
    SCOPED_TRACE(padding);
    expect_load_of_cpu_ranks(ranks(), padding);
  }
}

// Gradients of several microbatches add up on the GPU, and each parameter is reported final once.
void expect_sums(int ranks, const ModelConfig& config, const TransformerOptions& options) {
  run_gpus({ranks, {}, 60, ranks_per_gpu(ranks)}, [&](Communicator& comm) {
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
    int64_t experts = model.experts_begin(), dense = experts;
    const auto ready = [&](FlatRange range) {
      int64_t& end = range.begin >= experts ? begin : dense;
      EXPECT_EQ(range.end(), end);
      end = range.begin;
    };
    for (const uint64_t seed : {1, 2, 3}) {
      dense = experts;
      pass(seed, ready);
      EXPECT_EQ(begin, experts);
      EXPECT_EQ(dense, 0);
      const HostCopy gradients(model.exec(), model.gradients());
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += double(gradients.values()[i]);
      clear(model.exec(), model.gradients());
    }
    for (const uint64_t seed : {1, 2}) pass(seed, {});
    dense = experts;
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

TEST_P(GpuTransformer, MicrobatchesAccumulate) {
  expect_sums(ranks(), gpu_model(kVariants[0]), {.batch = 1, .seq = 40});
}

TEST_P(GpuTransformer, MicrobatchesOfExpertsAccumulate) {
  expect_sums(ranks(), gpu_moe_model(), {.batch = 1, .seq = 40, .dtype = DType::bf16});
}

void expect_same_bits(int ranks, const ModelConfig& config, bool fp8 = false) {
  const TransformerOptions options{.batch = 2, .seq = 72, .dtype = DType::bf16, .fp8 = fp8};
  run_gpus({ranks, {}, 60, ranks_per_gpu(ranks)}, [&](Communicator& comm) {
    Transformer model(comm, config, options);
    model.initialize(5);
    const Batch batch = make_batch(config, options.batch * options.seq);
    std::vector<float> before;
    for (int i = 0; i < 3; ++i) {
      model.begin_step(1);
      const double loss = model.forward(batch.tokens, batch.targets);
      EXPECT_GT(loss, 0);
      model.backward(1);
      const HostCopy copied(model.exec(), model.gradients());
      const auto gradients = copied.values();
      int64_t others = 0;
      size_t last = 0;
      for (size_t j = 0; j < before.size(); ++j) {
        if (std::bit_cast<uint32_t>(before[j]) == std::bit_cast<uint32_t>(gradients[j])) continue;
        ++others;
        last = j;
      }
      EXPECT_EQ(others, 0) << "pass " << i << ": other bits up to element " << last << " of "
                           << gradients.size() << ": " << (others > 0 ? before[last] : 0) << ", "
                           << (others > 0 ? gradients[last] : 0);
      before.assign(gradients.begin(), gradients.end());
    }
  });
}

TEST_P(GpuTransformer, TwoStepsGiveTheSameBits) {
  for (const auto& [model, config] : gpu_models(ranks())) {
    SCOPED_TRACE(model);
    expect_same_bits(ranks(), config);
  }
  ModelConfig config = gpu_model(kVariants[0]);
  config.ffn = 128;
  expect_same_bits(ranks(), config, true);
  for (const MoeVariant& variant : kMoeVariants) {
    SCOPED_TRACE(variant.name);
    expect_same_bits(ranks(), gpu_moe_model(variant));
  }
}

TEST_P(GpuTransformer, LateRankIsNamedByTheOthers) {
  if (ranks() == 1) GTEST_SKIP() << "needs another rank";
  const ModelConfig config = gpu_model(kVariants[0]);
  const TransformerOptions options{.batch = 2, .seq = 72, .dtype = DType::bf16};
  for (const int steps : {0, 3}) {
    SCOPED_TRACE(steps);
    const auto late =
        timeout_without_last([&](gpu::GpuCommunicator& comm) -> std::function<void()> {
          auto model = std::make_shared<Transformer>(comm, config, options);
          model->initialize(5);
          const auto step = [model, batch = make_batch(config, options.batch * options.seq)] {
            model->forward(batch.tokens, batch.targets);
            model->backward(1);
          };
          for (int i = 0; i < steps; ++i) step();
          return step;
        });
    EXPECT_TRUE(late);
  }
}

TEST(GpuTransformerErrors, ExpertsInF32AreRefused) {
  run_gpus({1, {}, 60, 1}, [&](Communicator& comm) {
    EXPECT_THROW(Transformer(comm, gpu_moe_model(), {.batch = 1, .seq = 8}), InvalidArgument);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuTransformer, ::testing::Values(1, 2, 4),
                         [](const auto& test) { return "gpus" + std::to_string(test.param); });

}  // namespace
}  // namespace tandem::test
