// The head's rows at a time, against all at once.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tandem/error.h"
#include "tests/engine/model/harness.h"

namespace tandem {
namespace {
using namespace tandem::test;

class HeadRows : public ::testing::TestWithParam<VariantOnRanks> {};
INSTANTIATE_TEST_SUITE_P(Cases, HeadRows, ::testing::ValuesIn(variants_on_ranks()),
                         [](const auto& test) {
                           return std::string(test.param.variant.name) + "_tp" +
                                  std::to_string(test.param.ranks);
                         });

// A row's logits and their gradient have the same bits; gradients of weights are sums of chunks.
TEST_P(HeadRows, GiveTheLossAndGradientsOfAllAtOnce) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const auto& [variant, ranks] = GetParam();
  const ModelConfig config = small_model(variant);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    TransformerOptions options{.batch = 3, .seq = 8, .dtype = dtype};
    const Step expected = run_on_threads(ranks, config, options);
    for (const int64_t rows : {4, 8, 12, 24}) {
      SCOPED_TRACE(fmt::format("{} rows in {}", rows, name_of(dtype)));
      options.head_rows = rows;
      const Step found = run_on_threads(ranks, config, options),
                 again = run_on_threads(ranks, config, options);
      EXPECT_NEAR(found.loss, expected.loss, 1e-12 * expected.loss);
      EXPECT_EQ(found.gradients, again.gradients);
      EXPECT_LE(difference(found.gradients, expected.gradients), 1e-6);
      options.gradient_dtype = dtype;
      const Step rounded = run_on_threads(ranks, config, options);
      EXPECT_LE(difference(rounded.gradients, expected.gradients),
                dtype == DType::f32 ? 1e-6 : 0x1p-8);
      options.gradient_dtype = DType::f32;
    }
  }
}

TEST(HeadRowsErrors, RowsThatDoNotDivideTheTokensAreRefused) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  for (const int64_t rows : {-4, 3, 5, 48}) {
    TransformerOptions options{.batch = 2, .seq = 8};
    options.head_rows = rows;
    WorldOptions world;
    world.ranks = 2;
    EXPECT_THROW(run_threads(world,
                             [&](Communicator& comm) {
                               const Transformer model(comm, small_model(), options);
                             }),
                 InvalidArgument)
        << rows;
  }
}

}  // namespace
}  // namespace tandem
