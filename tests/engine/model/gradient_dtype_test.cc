// Gradients in bf16, of the weights and of the residual stream, against those in f32.
#include <gtest/gtest.h>

#include "core/cpu/scalar.h"
#include "tests/engine/model/harness.h"

namespace tandem {
namespace {
using namespace tandem::test;

class GradientDType : public ::testing::TestWithParam<VariantOnRanks> {
 protected:
  Step run(const TransformerOptions& options) const {
    return run_on_threads(GetParam().ranks, small_model(GetParam().variant), options);
  }
  /// Gradients in bf16 have one rounding of each element, two of a tied embedding, which a product
  /// and the lookups add to.
  void expect_rounded(TransformerOptions options) const;
};
INSTANTIATE_TEST_SUITE_P(Cases, GradientDType, ::testing::ValuesIn(variants_on_ranks()),
                         [](const auto& test) {
                           return std::string(test.param.variant.name) + "_tp" +
                                  std::to_string(test.param.ranks);
                         });

constexpr double kUnit = 0x1p-8;  // largest relative error of a rounding to bf16

Tensors rounded(Tensors tensors) {
  for (auto& [name, values] : tensors) {
    for (float& value : values) value = BFloat16::from_float(value).to_float();
  }
  return tensors;
}

void GradientDType::expect_rounded(TransformerOptions options) const {
  const Step in_f32 = run(options);
  options.gradient_dtype = DType::bf16;
  const Step found = run(options), again = run(options);
  EXPECT_EQ(found.loss, in_f32.loss);
  EXPECT_EQ(found.gradients, rounded(found.gradients));
  EXPECT_NE(found.gradients, in_f32.gradients);
  EXPECT_EQ(found.gradients, again.gradients);
  for (const auto& [name, values] : in_f32.gradients) {
    const bool is_tied = GetParam().variant.tied && name == "model.embed_tokens.weight";
    EXPECT_LE(difference({{name, found.gradients.at(name)}}, {{name, values}}),
              (is_tied ? 2 : 1) * kUnit)
        << name;
  }
}

TEST_P(GradientDType, WeightsAreThoseInF32Rounded) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  expect_rounded({.batch = 3, .seq = 7, .dtype = DType::bf16});
}

// Products of e4m3 columns are rounded as those of bf16 are, and several ranks' are in bf16.
TEST_P(GradientDType, WeightsInFp8AreThoseInF32Rounded) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  for (const bool fp8_weight_gradients : {true, false}) {
    TransformerOptions options{.batch = 2, .seq = 8, .dtype = DType::bf16, .fp8 = true};
    options.fp8_weight_gradients = fp8_weight_gradients;
    expect_rounded(options);
  }
}

// Every branch rounds the gradient once more: twice the error of the form that rounds only a copy.
TEST_P(GradientDType, ErrorOfTheResidualStreamsIsThatOfBf16) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  TransformerOptions options{.batch = 3, .seq = 7};
  const Step exact = run(options);
  options.dtype = DType::bf16;
  const Step in_f32 = run(options);
  options.residual_gradient = DType::bf16;
  const Step found = run(options), again = run(options);
  EXPECT_EQ(found.loss, in_f32.loss);
  EXPECT_EQ(found.gradients, again.gradients);
  EXPECT_NE(found.gradients, in_f32.gradients);
  EXPECT_LE(difference(found.gradients, exact.gradients),
            2 * difference(in_f32.gradients, exact.gradients));
}

}  // namespace
}  // namespace tandem
