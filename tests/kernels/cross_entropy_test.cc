#include "kernels/cross_entropy.h"

#include <gtest/gtest.h>

#include "tandem/collectives.h"
#include "tests/kernels/reference.h"

namespace tandem {
namespace {
using namespace tandem::test;

double reference(const Doubles& logits, const std::vector<int32_t>& targets) {
  const size_t vocab = logits.size() / targets.size();
  double loss = 0;
  for (size_t row = 0; row < targets.size(); ++row) {
    if (targets[row] < 0) continue;
    double largest = -INFINITY, sum = 0;
    for (size_t i = 0; i < vocab; ++i) largest = std::max(largest, logits[row * vocab + i]);
    for (size_t i = 0; i < vocab; ++i) sum += std::exp(logits[row * vocab + i] - largest);
    loss += largest + std::log(sum) - logits[row * vocab + size_t(targets[row])];
  }
  return loss;
}

template <typename T>
Tensor vector(std::vector<T>& values) {
  return Tensor::of(std::span(values), {int64_t(values.size())});
}

/// Steps of a sharded loss, with the reductions over shards computed here.
void check(int shards, DType dtype, double spread) {
  const int64_t vocab = 37;
  std::vector<int32_t> targets{0, 36, -1, 18, 19, 5};
  const int64_t rows = int64_t(targets.size());
  Matrix logits(DType::f32, rows, vocab);
  logits.fill("logits", spread);

  std::vector<float> maxima(targets.size(), -INFINITY), sums(targets.size()),
      picked(targets.size()), shard_values(targets.size()), shard_picked(targets.size());
  const auto columns = [&](int shard, const Tensor& t) {
    const Shard s = shard_of(vocab, shards, shard);
    return t.transposed().rows(s.begin, s.count).transposed();
  };
  for (int s = 0; s < shards; ++s) {
    cross_entropy_max(Exec{}, columns(s, logits.tensor), vector(shard_values));
    for (size_t i = 0; i < shard_values.size(); ++i)
      maxima[i] = std::max(maxima[i], shard_values[i]);
  }
  for (int s = 0; s < shards; ++s) {
    cross_entropy_sum(Exec{}, columns(s, logits.tensor), vector(targets),
                      shard_of(vocab, shards, s).begin, vector(maxima), vector(shard_values),
                      vector(shard_picked));
    for (size_t i = 0; i < shard_values.size(); ++i)
      sums[i] += shard_values[i], picked[i] += shard_picked[i];
  }
  double loss = 0, total = 100;
  const auto add_loss_to = [&](double& sum) {
    cross_entropy_loss(Exec{}, vector(targets), vector(sums), vector(picked),
                       Tensor(&sum, DType::u8, {sizeof(sum)}));
  };
  add_loss_to(loss);
  add_loss_to(total);
  const double expected = reference(logits.values(), targets);
  EXPECT_NEAR(loss, expected, 1e-5 * expected);
  EXPECT_EQ(total, 100 + loss);

  Matrix dlogits(dtype, rows, vocab);
  for (int s = 0; s < shards; ++s) {
    cross_entropy_backward(Exec{}, columns(s, logits.tensor), vector(targets),
                           shard_of(vocab, shards, s).begin, vector(maxima), vector(sums), 0.5f,
                           columns(s, dlogits.tensor));
  }
  auto numeric = numeric_gradient(logits.values(),
                                  [&](const Doubles& x) { return 0.5 * reference(x, targets); });
  EXPECT_LE(relative_error(dlogits.values(), numeric), tolerance(dtype));
}

TEST(CrossEntropy, MatchesReferenceAndDifferences) {
  for (const int shards : {1, 2, 3, 40}) {
    for (const DType dtype : {DType::f32, DType::bf16}) check(shards, dtype, 2);
  }
}

TEST(CrossEntropy, BothStepsAtOnceHaveTheirBits) {
  std::vector<int32_t> targets{0, 36, -1};
  Matrix logits(DType::f32, 3, 37);
  logits.fill("logits");
  std::vector<float> maxima(3), sums(3), picked(3), max(3), sum(3), pick(3);
  cross_entropy_max(Exec{}, logits.tensor, vector(maxima));
  cross_entropy_sum(Exec{}, logits.tensor, vector(targets), 0, vector(maxima), vector(sums),
                    vector(picked));
  cross_entropy_max_and_sum(Exec{}, logits.tensor, vector(targets), vector(max), vector(sum),
                            vector(pick));
  EXPECT_EQ(max, maxima);
  EXPECT_EQ(sum, sums);
  EXPECT_EQ(pick, picked);
}

TEST(CrossEntropy, LargeLogitsStayFinite) {
  check(2, DType::f32, 60);
}

}  // namespace
}  // namespace tandem
