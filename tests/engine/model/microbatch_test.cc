// Several microbatches in flight give the gradients of one after another, bit for bit.
#include <gtest/gtest.h>

#include "tandem/error.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;

struct Case {
  const char* name;
  void (*change)(ModelConfig&);
};
const Case kCases[] = {{"dense", [](ModelConfig&) {}},
                       {"parallel_block", [](ModelConfig& c) { c.parallel_block = true; }},
                       {"experts", [](ModelConfig& c) {
                          c.experts = 4;
                          c.top_k = 2;
                          c.expert_ffn = 12;
                          c.shared_ffn = 8;
                          c.moe_layer_freq = 2;
                          c.aux_loss_coeff = 1;
                        }}};

class MicrobatchTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Models, MicrobatchTest, ::testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

constexpr int kMicrobatches = 3;
/// Forward passes are the microbatch's number, backward passes that number + 10.
using Order = std::vector<int>;

struct Result {
  std::vector<double> losses = std::vector<double>(kMicrobatches);
  std::vector<float> gradients;
  bool operator==(const Result&) const = default;
};

Result run(Communicator& comm, const ModelConfig& config, DType dtype, const Order& order,
           bool local) {
  set_kernel_threads(1);
  Transformer model(comm, config, {.batch = 2, .seq = 9, .dtype = dtype});
  model.initialize(17);
  for (float& w : floats(model.parameters())) w = w == 1 ? w : w * 5;
  model.parameters_changed();
  std::vector<Microbatch> all;
  for (int i = 0; i < kMicrobatches && !local; ++i) all.push_back(model.make_microbatch());
  Result result;
  for (const int what : order) {
    const size_t i = size_t(what % 10);
    if (what >= 10) {
      local ? model.backward(0.1f) : model.backward(all[i], 0.1f);
      continue;
    }
    const Batch batch = make_batch(config, 18, i);
    result.losses[i] = local ? model.forward(batch.tokens, batch.targets)
                             : model.forward(batch.tokens, batch.targets, all[i]);
  }
  result.gradients.assign(floats(model.gradients()).begin(), floats(model.gradients()).end());
  return result;
}

TEST_P(MicrobatchTest, InterleavedPassesGiveTheSameGradients) {
  ModelConfig config = small_model();
  GetParam().change(config);
  const auto check = [&](Communicator& comm) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const auto of = [&](const Order& order, bool local = false) {
        return run(comm, config, dtype, order, local);
      };
      const Result one_by_one = of({0, 10, 1, 11, 2, 12}, true);
      EXPECT_EQ(of({0, 10, 1, 11, 2, 12}), one_by_one);
      EXPECT_EQ(of({0, 1, 2, 10, 11, 12}), one_by_one) << "all forward passes first";
      EXPECT_EQ(of({0, 1, 10, 2, 11, 12}), one_by_one) << "one forward, one backward";
      EXPECT_EQ(of({2, 1, 0, 10, 11, 12}), one_by_one);
      EXPECT_EQ(of({0, 1, 2, 12, 11, 10}), of({2, 12, 1, 11, 0, 10}, true));
      EXPECT_NE(of({0, 10, 1, 11}).gradients, one_by_one.gradients);
    }
  };
  if (launched_by_mpi()) return run_mpi({}, check);
  for (const int ranks : {1, 2}) {
    WorldOptions world;
    world.ranks = ranks;
    run_threads(world, check);
  }
}

TEST(Microbatch, BackwardWithoutForwardIsRefused) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  run_threads({}, [](Communicator& comm) {
    Transformer model(comm, small_model(), {.batch = 1, .seq = 4});
    Microbatch unused = model.make_microbatch();
    const Batch batch = make_batch(small_model(), 4);
    model.forward(batch.tokens, batch.targets);
    EXPECT_THROW(model.backward(unused, 1), InvalidArgument);
    EXPECT_NO_THROW(model.backward(1));
  });
}

}  // namespace
}  // namespace tandem
