#include <gtest/gtest.h>

#include "tests/engine/model/harness.h"

namespace tandem {
namespace {
using namespace tandem::test;

OverlapOptions with(Strategy strategy) {
  OverlapOptions options;
  options.strategy = strategy;
  return options;
}

struct Case {
  Variant variant;
  int ranks;
  Strategy strategy;
};
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Variant& variant : kVariants) {
    for (const int ranks : {1, 2, 4}) {
      if (variant.kv_heads % ranks != 0) continue;
      for (const Strategy s : {Strategy::serial, Strategy::overlapped}) {
        all.push_back({variant, ranks, s});
      }
    }
  }
  return all;
}

class Parallel : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, Parallel, ::testing::ValuesIn(cases()), [](const auto& test) {
  return std::string(test.param.variant.name) + "_tp" + std::to_string(test.param.ranks) + "_" +
         std::string(name_of(test.param.strategy));
});

// 3 x 7 = 21 tokens, 37 words and 22 features are divisible by no world size.
TEST_P(Parallel, SameLossAndGradientsAsOneRank) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const auto& [variant, ranks, strategy] = GetParam();
  const ModelConfig config = small_model(variant);
  const TransformerOptions serial_options{.batch = 3, .seq = 7, .overlap = with(Strategy::serial)};
  const TransformerOptions options{.batch = 3, .seq = 7, .overlap = with(strategy)};
  const Step one = run_on_threads(1, config, serial_options),
             many = run_on_threads(ranks, config, options);
  EXPECT_NEAR(many.loss, one.loss, 1e-5 * one.loss);
  EXPECT_LE(difference(many.gradients, one.gradients), 1e-5);

  const Step again = run_on_threads(ranks, config, options);
  EXPECT_EQ(again.loss, many.loss);
  EXPECT_EQ(again.gradients, many.gradients);
}

TEST_P(Parallel, Bf16StaysCloseToF32) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const auto& [variant, ranks, strategy] = GetParam();
  const ModelConfig config = small_model(variant);
  TransformerOptions options{.batch = 3, .seq = 7, .overlap = with(strategy)};
  const Step f32 = run_on_threads(1, config, options);
  options.dtype = DType::bf16;
  const Step bf16 = run_on_threads(ranks, config, options);
  EXPECT_NEAR(bf16.loss, f32.loss, 0.01 * f32.loss);
  EXPECT_LE(difference(bf16.gradients, f32.gradients), 0.03);
}

TEST(Parallel, MpiRanksMatchOneRank) {
  if (!launched_by_mpi()) GTEST_SKIP() << "under mpirun";
  run_mpi({}, [](Communicator& comm) {
    for (const Variant& variant : kVariants) {
      if (variant.kv_heads % comm.size() != 0) continue;
      const ModelConfig config = small_model(variant);
      for (const Strategy strategy : {Strategy::serial, Strategy::overlapped}) {
        const TransformerOptions options{.batch = 3, .seq = 7, .overlap = with(strategy)};
        const Step one = run_on_threads(1, config, options);
        const Step many = run_step(comm, config, options);
        EXPECT_NEAR(many.loss, one.loss, 1e-5 * one.loss);
        // Gradients of this rank's shards, compared with the same elements of the whole.
        Tensors expected = one.gradients;
        for (const auto& [name, values] : many.gradients) {
          for (size_t i = 0; i < values.size(); ++i) {
            if (values[i] == 0) expected[name][i] = 0;
          }
        }
        EXPECT_LE(difference(many.gradients, expected), 1e-5) << variant.name;
        const Step again = run_step(comm, config, options);
        EXPECT_EQ(again.loss, many.loss);
        EXPECT_EQ(again.gradients, many.gradients);
      }
    }
  });
}

}  // namespace
}  // namespace tandem
