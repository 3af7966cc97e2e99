// Training with e4m3 operands (TransformerOptions::fp8) on CPU ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "codec/quantize.h"
#include "engine/model/weights.h"
#include "gemm/quantized_gemm.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;

TransformerOptions options_of(DType dtype, bool fp8) {
  return {.batch = 2, .seq = 16, .dtype = dtype, .fp8 = fp8};
}

double error_of(const Step& found, const Step& exact, const std::string& name) {
  return difference({{name, found.gradients.at(name)}}, {{name, exact.gradients.at(name)}});
}

/// A value's rounding error is uniform in half a step, 2^-4 of its binade's begin: relative to
/// values spread over a binade .026, and .037 of a product of two. A gradient passes at most the
/// GEMMs of all layers in both passes, two a branch, whose errors are independent; the inner factor
/// is of softmax, SwiGLU and norms, which may amplify them.
double bound_of(const ModelConfig& config) {
  const double gemms = 2 * 2 * 2 * double(config.layers), amplified = 2;
  return amplified * 0.037 * std::sqrt(gemms);
}

TEST(Fp8, GradientsAreWithinTheirRounding) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  for (const Variant& variant : kVariants) {
    const ModelConfig config = small_model(variant);
    const Step exact = run_on_threads(1, config, options_of(DType::f32, false)),
               in_bf16 = run_on_threads(1, config, options_of(DType::bf16, false));
    for (const int ranks : {1, 2}) {
      const Step found = run_on_threads(ranks, config, options_of(DType::bf16, true));
      EXPECT_NEAR(found.loss, exact.loss, 0.02 * exact.loss) << variant.name;
      for (const auto& [name, values] : exact.gradients) {
        const double error = error_of(found, exact, name);
        EXPECT_LE(error, bound_of(config)) << variant.name << " " << name << " ranks " << ranks;
        EXPECT_GT(error, error_of(in_bf16, exact, name)) << variant.name << " " << name;
      }
    }
  }
}

/// Gradients of the layers' matrices, over `scale`, which is of the loss.
Tensors gradients_of_matrices(const TransformerOptions& options, float scale) {
  const ModelConfig config = small_model(kVariants[1]);
  Tensors found;
  run_threads({}, [&](Communicator& comm) {
    set_kernel_threads(1);
    Transformer model(comm, config, options);
    model.initialize(17);
    const Batch batch = make_batch(config, options.batch * options.seq);
    model.forward(batch.tokens, batch.targets);
    model.backward(scale);
    const HostCopy gradients(model.exec(), model.gradients());
    for (float& each : gradients.values()) each /= scale;
    collect(model.parameter_list(), gradients.values(), found);
  });
  std::erase_if(found, [](const auto& each) { return !each.first.ends_with("_proj.weight"); });
  return found;
}

// A loss is the mean of a step's tokens, and gradients are as small as these are many.
TEST(Fp8, ScalesMakeGradientsIndependentOfTheLossScaleAndWithoutThemTheyAreLost) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  TransformerOptions options = options_of(DType::bf16, true);
  const Tensors expected = gradients_of_matrices(options, 1);
  EXPECT_EQ(gradients_of_matrices(options, 0x1p-14f), expected);
  EXPECT_EQ(gradients_of_matrices(options, 0x1p-40f), expected);
  options.fp8_scales = false;
  EXPECT_GT(difference(gradients_of_matrices(options, 0x1p-14f), expected), 0.8);
}

TEST(Fp8, RecomputedActivationsGiveTheSameBits) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  TransformerOptions options = options_of(DType::bf16, true);
  const Tensors expected = gradients_of_matrices(options, 1);
  for (const Recompute mode : {Recompute::selective, Recompute::full}) {
    options.recompute = {mode};
    EXPECT_EQ(gradients_of_matrices(options, 1), expected);
  }
}

/// Mean loss of the last steps of gradient descent over a few batches, with a loss that is scaled
/// as if a step had 2^14 times as many tokens.
double loss_of_training(const TransformerOptions& options) {
  constexpr float kScale = 0x1p-14f, kRate = 0.002f;
  constexpr int kSteps = 160, kBatches = 4;
  const ModelConfig config = small_model(kVariants[1]);
  double loss = 0;
  run_threads({}, [&](Communicator& comm) {
    set_kernel_threads(1);
    Transformer model(comm, config, options);
    model.initialize(17);
    for (int step = 0; step < kSteps; ++step) {
      const Batch batch =
          make_batch(config, options.batch * options.seq, uint64_t(step % kBatches));
      model.begin_step();
      const double of_step = model.forward(batch.tokens, batch.targets);
      if (step >= kSteps - kBatches) loss += of_step / kBatches;
      model.backward(kScale);
      const auto weights = floats(model.parameters()), gradients = floats(model.gradients());
      for (size_t i = 0; i < weights.size(); ++i) weights[i] -= kRate / kScale * gradients[i];
      model.parameters_changed();
    }
  });
  return loss;
}

TEST(Fp8, TrainingReachesTheLossOfBf16AndWithoutScalesDoesNot) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  const double expected = loss_of_training(options_of(DType::bf16, false));
  TransformerOptions options = options_of(DType::bf16, true);
  EXPECT_LT(loss_of_training(options), 1.02 * expected);
  options.fp8_scales = false;
  EXPECT_GT(loss_of_training(options), 1.25 * expected);
}

// Passes of a step use the codes of its first pass, whatever becomes of the weights meanwhile.
TEST(Fp8, WeightsAreQuantizedOnceAStep) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  const ModelConfig config = small_model(kVariants[1]);
  run_threads({}, [&](Communicator& comm) {
    set_kernel_threads(1);
    for (const bool fp8 : {true, false}) {
      Transformer model(comm, config, options_of(DType::bf16, fp8));
      model.initialize(17);
      const Batch batch = make_batch(config, 32);
      model.begin_step();
      const auto loss = [&] {
        const double result = model.forward(batch.tokens, batch.targets);
        model.backward(1);
        return result;
      };
      const auto change_working_copy = [&](float factor) {
        for (const Parameter& p : model.parameter_list()) {
          if (!p.name.ends_with("_proj.weight")) continue;
          auto* const values = model.weights().working.as<BFloat16>() + p.offset;
          for (int64_t i = 0; i < local_range(p).count; ++i) {
            values[i] = BFloat16::from_float(factor * values[i].to_float());
          }
        }
      };
      const double before = loss();
      change_working_copy(2);
      EXPECT_EQ(loss() == before, fp8);
      for (float& each : floats(model.parameters())) each *= 2;
      model.parameters_changed();
      const double after = loss();
      EXPECT_NE(after, before);
      change_working_copy(0.5f);
      EXPECT_EQ(loss() == after, fp8);
      model.await_parameters({});
      EXPECT_NE(loss(), after);
    }
  });
}

TEST(Fp8, GemmOfRowsIsRoundedAndAdded) {
  constexpr int64_t kRows = 5, kColumns = 3, kDepth = 40;
  std::vector<float> x, weight;
  for (int64_t i = 0; i < kRows * kDepth; ++i) x.push_back(normal(5, 1, uint64_t(i)));
  for (int64_t i = 0; i < kColumns * kDepth; ++i) weight.push_back(normal(5, 2, uint64_t(i)));
  std::vector<Float8E4M3> codes(x.size()), weight_codes(weight.size());
  std::vector<float> scales(kRows), weight_scales(kColumns);
  const QuantizedRows a{Tensor(codes.data(), DType::e4m3, {kRows, kDepth}), flat(scales)},
      b{Tensor(weight_codes.data(), DType::e4m3, {kColumns, kDepth}), flat(weight_scales)};
  quantize_rows(Exec{}, Tensor::of(std::span(x), {kRows, kDepth}), a.codes, a.scales);
  quantize_rows(Exec{}, Tensor::of(std::span(weight), {kColumns, kDepth}), b.codes, b.scales);
  std::vector<float> out(kRows * kColumns);
  std::vector<BFloat16> rounded(out.size());
  for (const bool accumulate : {false, true}) {
    gemm(Exec{}, a, b, Tensor::of(std::span(out), {kRows, kColumns}), accumulate);
    gemm(Exec{}, a, b, Tensor(rounded.data(), DType::bf16, {kRows, kColumns}), accumulate);
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      const auto row = size_t(i / kColumns), column = size_t(i % kColumns);
      double expected = 0;
      for (size_t k = 0; k < kDepth; ++k) {
        expected += double(codes[row * kDepth + k].to_float()) * double(scales[row]) *
                    double(weight_codes[column * kDepth + k].to_float()) *
                    double(weight_scales[column]);
      }
      expected *= accumulate ? 2 : 1;
      EXPECT_NEAR(out[size_t(i)], expected, 1e-5 * (1 + std::abs(expected)));
      EXPECT_NEAR(rounded[size_t(i)].to_float(), expected, 0x1p-7 * (1e-3 + std::abs(expected)));
    }
  }
}

TEST(Fp8, NonfiniteWeightMakesTheLossNonfinite) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  const ModelConfig config = small_model(kVariants[1]);
  run_threads({}, [&](Communicator& comm) {
    set_kernel_threads(1);
    Transformer model(comm, config, options_of(DType::bf16, true));
    const Batch batch = make_batch(config, 32);
    for (const float value : {INFINITY, NAN}) {
      model.initialize(17);
      EXPECT_TRUE(std::isfinite(model.forward(batch.tokens, batch.targets)));
      const auto& list = model.parameter_list();
      const auto gate = std::ranges::find_if(
          list, [](const Parameter& p) { return p.name.ends_with("0.mlp.gate_proj.weight"); });
      ASSERT_NE(gate, list.end());
      floats(model.parameters())[size_t(gate->offset)] = value;
      model.parameters_changed();
      EXPECT_FALSE(std::isfinite(model.forward(batch.tokens, batch.targets))) << value;
    }
  });
}

TEST(Fp8, ColumnsAreQuantizedAsRowsOfTheTranspose) {
  constexpr int64_t kRows = 11, kColumns = 7;
  std::vector<BFloat16> x, transposed(kRows * kColumns);
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    x.push_back(BFloat16::from_float(std::ldexp(normal(3, 1, uint64_t(i)), int(i % kColumns) * 4)));
    transposed[size_t(i % kColumns * kRows + i / kColumns)] = x.back();
  }
  std::vector<Float8E4M3> codes(x.size()), expected(x.size());
  std::vector<float> scales(kColumns), expected_scales(kColumns);
  const auto codes_of = [&](std::vector<Float8E4M3>& values) {
    return Tensor(values.data(), DType::e4m3, {kColumns, kRows});
  };
  const auto scales_of = [](std::vector<float>& values) {
    return Tensor(values.data(), DType::f32, {kColumns});
  };
  quantize_columns(Exec{}, Tensor(x.data(), DType::bf16, {kRows, kColumns}), codes_of(codes),
                   scales_of(scales));
  quantize_rows(Exec{}, Tensor(transposed.data(), DType::bf16, {kColumns, kRows}),
                codes_of(expected), scales_of(expected_scales));
  EXPECT_EQ(scales, expected_scales);
  std::vector<float> values(x.size());
  dequantize_rows(codes_of(codes), scales_of(scales),
                  Tensor(values.data(), DType::f32, {kColumns, kRows}));
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(codes[i].bits, expected[i].bits) << i;
    EXPECT_NEAR(
        values[i], transposed[i].to_float(),
        std::max(0x1.01p-4f * std::abs(transposed[i].to_float()), 0x1.01p-10f * scales[i / kRows]));
  }
}

}  // namespace
}  // namespace tandem
