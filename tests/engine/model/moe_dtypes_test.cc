// Transformers with experts on CPU ranks: GEMMs of experts on e4m3 rows, and gradients in bf16.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/cpu/scalar.h"
#include "engine/model/weights.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;

/// All experts of every row, so that no rounding changes a choice.
ModelConfig moe_model() {
  ModelConfig c = small_model(kVariants[1]);
  c.experts = c.top_k = 4;
  c.expert_ffn = 16;
  c.shared_ffn = 24;
  c.shared_expert_gate = true;
  return c;
}

TransformerOptions fp8_options() {
  return {.batch = 2, .seq = 16, .dtype = DType::bf16, .fp8 = true, .fp8_experts = true};
}

bool is_expert(const std::string& name) {
  return name.find(".experts.") != std::string::npos;
}

TEST(MoeDTypes, GradientsInBf16AreThoseInF32Rounded) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  constexpr double kUnit = 0x1p-8;  // largest relative error of a rounding to bf16
  for (const int ranks : {1, 2, 4}) {
    ModelConfig config = moe_model();
    config.kv_heads = 4;
    config.top_k = ranks == 2 ? 1 : 4;  // experts without rows, whose gradients are stored zeros
    TransformerOptions options{.batch = 3, .seq = 8, .dtype = DType::bf16};
    const Step in_f32 = run_on_threads(ranks, config, options);
    options.gradient_dtype = DType::bf16;
    const Step found = run_on_threads(ranks, config, options);
    EXPECT_EQ(found.loss, in_f32.loss);
    int experts = 0;
    for (const auto& [name, values] : in_f32.gradients) {
      const std::vector<float>& got = found.gradients.at(name);
      for (const float value : got) {
        ASSERT_EQ(value, BFloat16::from_float(value).to_float()) << name;
      }
      if (std::ranges::all_of(values, [](float value) { return value == 0; })) {
        EXPECT_EQ(got, values) << name;  // of an expert without rows
      } else {
        EXPECT_LE(difference({{name, got}}, {{name, values}}), kUnit) << name << " ranks " << ranks;
      }
      experts += is_expert(name);
    }
    EXPECT_GT(experts, 0);
    EXPECT_NE(found.gradients, in_f32.gradients);
  }
}

TEST(MoeDTypes, GradientsOfFp8ExpertsAreWithinTheirRounding) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = moe_model();
  const TransformerOptions in_f32{.batch = 2, .seq = 16},
      in_bf16{.batch = 2, .seq = 16, .dtype = DType::bf16};
  const Step exact = run_on_threads(1, config, in_f32), bf16 = run_on_threads(1, config, in_bf16);
  // As in fp8_test.cc: two GEMMs a branch, in both passes of two layers.
  const double bound = 2 * 0.037 * std::sqrt(2 * 2 * 2 * double(config.layers));
  for (const int ranks : {1, 2}) {
    const Step found = run_on_threads(ranks, config, fp8_options());
    EXPECT_NEAR(found.loss, exact.loss, 0.02 * exact.loss);
    for (const auto& [name, values] : exact.gradients) {
      const auto error = [&](const Step& step) {
        return difference({{name, step.gradients.at(name)}}, {{name, values}});
      };
      EXPECT_LE(error(found), bound) << name << " ranks " << ranks;
      EXPECT_GT(error(found), error(bf16)) << name << " ranks " << ranks;
    }
  }
}

/// Gradients of the experts over `scale`, which is of the loss.
Tensors expert_gradients(const TransformerOptions& options, float scale) {
  const ModelConfig config = moe_model();
  Tensors found;
  run_threads({}, [&](Communicator& comm) {
    set_kernel_threads(1);
    Transformer model(comm, config, options);
    model.initialize(17);
    const Batch batch = make_batch(config, options.batch * options.seq);
    model.forward(batch.tokens, batch.targets);
    model.backward(scale);
    std::vector<float> gradients(floats(model.gradients()).begin(),
                                 floats(model.gradients()).end());
    for (float& each : gradients) each /= scale;
    collect(model.parameter_list(), gradients, found);
  });
  std::erase_if(found, [](const auto& each) { return !is_expert(each.first); });
  return found;
}

// A loss is the mean of a step's tokens, and gradients are as small as these are many.
TEST(MoeDTypes, ScalesKeepSmallGradientsAndWithoutThemTheyAreLost) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  TransformerOptions options = fp8_options();
  const Tensors expected = expert_gradients(options, 1);
  EXPECT_FALSE(expected.empty());
  EXPECT_EQ(expert_gradients(options, 0x1p-14f), expected);
  options.fp8_scales = false;
  EXPECT_GT(difference(expert_gradients(options, 0x1p-14f), expected), 0.8);
}

TEST(MoeDTypes, Fp8ExpertsRecomputeTheSameBits) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  const Step expected = run_on_threads(1, moe_model(), fp8_options());
  for (const MoeSave save : {MoeSave::sorted, MoeSave::rows, MoeSave::recompute}) {
    for (const Recompute mode : {Recompute::none, Recompute::selective, Recompute::full}) {
      TransformerOptions options = fp8_options();
      options.moe_save = save;
      options.recompute = {mode};
      const Step found = run_on_threads(1, moe_model(), options);
      EXPECT_EQ(found.loss, expected.loss) << name_of(save);
      EXPECT_EQ(found.gradients, expected.gradients) << name_of(save);
    }
  }
}

// Passes of a step use the codes of its first pass, whatever becomes of the weights meanwhile.
TEST(MoeDTypes, ExpertsAreQuantizedOnceAStep) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  const ModelConfig config = moe_model();
  run_threads({}, [&](Communicator& comm) {
    set_kernel_threads(1);
    for (const bool fp8 : {true, false}) {
      TransformerOptions options = fp8_options();
      options.fp8_experts = fp8;
      Transformer model(comm, config, options);
      model.initialize(17);
      const Batch batch = make_batch(config, options.batch * options.seq);
      model.begin_step();
      const auto loss = [&] {
        const double result = model.forward(batch.tokens, batch.targets);
        model.backward(1);
        return result;
      };
      const double before = loss();
      for (const Parameter& p : model.parameter_list()) {
        if (!is_expert(p.name)) continue;
        auto* const values = model.weights().working.as<BFloat16>() + p.offset;
        for (int64_t i = 0; i < local_range(p).count; ++i) {
          values[i] = BFloat16::from_float(2 * values[i].to_float());
        }
      }
      EXPECT_EQ(loss() == before, fp8);
      for (float& each : floats(model.parameters())) each *= 2;
      model.parameters_changed();
      EXPECT_NE(loss(), before);
    }
  });
}

}  // namespace
}  // namespace tandem
