// Ranks with shards of the logits choose the tokens of whole rows, bit for bit.
#include "engine/infer/sampling/shard_sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "tandem/collectives.h"
#include "tests/engine/infer/engine_cases.h"

namespace tandem {
namespace {
using namespace tandem::test;

/// Definition of the choice, with weights that are not rounded.
int32_t expected_token(std::span<const float> logits, const SampleOptions& o) {
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const size_t likeliest = size_t(std::ranges::max_element(logits) - logits.begin());
  if (o.temperature == 0) return int32_t(likeliest);
  const auto weight = [&](size_t token) {
    return std::exp((double(logits[token]) - double(logits[likeliest])) / o.temperature);
  };
  const bool is_cut = o.top_k > 0 && size_t(o.top_k) < order.size();
  if (is_cut || o.top_p < 1) {
    std::ranges::stable_sort(order, std::greater<>(), [&](size_t i) { return logits[i]; });
  }
  if (is_cut) order.resize(size_t(o.top_k));
  double total = 0;
  for (const size_t token : order) total += weight(token);
  if (o.top_p < 1) {
    double sum = 0;
    size_t count = 0;
    while (count < order.size() && sum < o.top_p * total) sum += weight(order[count++]);
    order.resize(count);
    total = sum;
  }
  double rest = o.uniform * total;
  for (const size_t token : order) {
    rest -= weight(token);
    if (rest < 0) return int32_t(token);
  }
  return int32_t(order.back());
}

struct Case {
  int64_t vocab;
  std::vector<SampleOptions> options;
  std::vector<std::vector<float>> rows;
};

std::vector<float> random_row(Choice& choice, int64_t vocab) {
  const double scale[] = {0, 0.1, 1, 4, 50}, spread = scale[choice.below(5)];
  const bool has_ties = choice.below(3) == 0;
  std::vector<float> row;
  for (int64_t i = 0; i < vocab; ++i) {
    const double value = spread * double(normal(choice.seed, 3, choice.count++));
    row.push_back(float(has_ties ? std::round(value) : value));
  }
  if (choice.below(12) == 0) {
    const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                         std::numeric_limits<float>::infinity(),
                         -std::numeric_limits<float>::infinity()};
    row[size_t(choice.below(vocab))] = bad[choice.below(3)];
  }
  return row;
}

Case random_case(uint64_t seed) {
  Choice choice{seed};
  const int64_t sizes[] = {4, 5, 17, 257, 1000, 3001};
  Case c{sizes[choice.below(6)], {}, {}};
  for (int64_t i = 0, rows = 1 + choice.below(6); i < rows; ++i) {
    const double temperatures[] = {0, 1, 0.3, 1.7, 1e-30, 40};
    const double shares[] = {1, 1, 0.9, 0.4, 1e-9, 0.999999};
    const int64_t counts[] = {0, 0, 1, 7, 256, 257, 3000, 100000};
    c.options.push_back({.temperature = temperatures[choice.below(6)],
                         .top_p = shares[choice.below(6)],
                         .top_k = counts[choice.below(8)],
                         .uniform = double(uniform(seed, 4, uint64_t(i)))});
    c.rows.push_back(random_row(choice, c.vocab));
  }
  return c;
}

bool is_finite(const std::vector<float>& row) {
  return std::ranges::all_of(row, [](float x) { return std::isfinite(x); });
}

constexpr uint64_t kCases = 200;

TEST(SampleRow, ChoosesAsDefined) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    const Case c = random_case(seed);
    for (size_t i = 0; i < c.rows.size(); ++i) {
      const Sampled sampled = sample_row(c.rows[i], c.options[i]);
      if (!is_finite(c.rows[i])) {
        EXPECT_EQ(sampled.token, -1);
        continue;
      }
      EXPECT_EQ(sampled.token, expected_token(c.rows[i], c.options[i])) << seed << ", row " << i;
      double sum = 0;
      for (const float logit : c.rows[i]) {
        sum += std::exp(double(logit) - double(c.rows[i][size_t(sampled.token)]));
      }
      EXPECT_NEAR(sampled.log_prob, -std::log(sum), 1e-6 * (1 + std::log(sum)));
    }
  }
}

TEST(ShardSampler, ChoosesTheTokensOfWholeRows) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  for (const int ranks : {1, 2, 3, 4}) {
    on_ranks(ranks, [&](Communicator& tp) {
      size_t num_rows = 0, num_left = 0;
      for (uint64_t seed = 0; seed < kCases; ++seed) {
        const Case c = random_case(seed);
        const Shard shard = shard_of(c.vocab, tp.size(), tp.rank());
        std::vector<float> local;
        for (const auto& row : c.rows) {
          local.insert(local.end(), row.begin() + shard.begin,
                       row.begin() + shard.begin + shard.count);
        }
        const auto rows = int64_t(c.rows.size());
        std::vector<Sampled> sampled(c.rows.size());
        ShardSampler sampler(tp, c.vocab);
        const std::vector<int32_t> left =
            sampler.run(Tensor::of(std::span(local), {rows, shard.count}), c.options, sampled);
        num_rows += c.rows.size();
        num_left += left.size();
        for (size_t i = 0; i < c.rows.size(); ++i) {
          const Sampled expected = sample_row(c.rows[i], c.options[i]);
          const bool is_left = std::ranges::count(left, int32_t(i)) > 0;
          const SampleOptions& o = c.options[i];
          EXPECT_EQ(sampled[i].token, is_left ? -1 : expected.token) << seed << ", row " << i;
          if (is_left) {
            const bool is_long = o.top_k > ShardSampler::kMaxCandidates && o.top_k < c.vocab;
            EXPECT_TRUE(is_long || (o.top_p < 1 && c.vocab > ShardSampler::kMaxCandidates));
          } else if (expected.token >= 0) {
            EXPECT_EQ(sampled[i].log_prob, expected.log_prob) << seed << ", row " << i;
          }
        }
      }
      EXPECT_GT(num_left, 0u);
      EXPECT_LT(num_left, num_rows / 4);
    });
  }
}

TEST(ShardSampler, SendsLittle) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  on_ranks(2, [&](Communicator& tp) {
    constexpr int64_t kVocab = 20000;
    std::vector<float> logits(kVocab / 2);
    for (size_t i = 0; i < logits.size(); ++i) {
      logits[i] = 3 * normal(5, uint64_t(tp.rank()), i);
    }
    const auto bytes_of = [&](const SampleOptions& options) {
      ShardSampler sampler(tp, kVocab);
      std::vector<Sampled> sampled(1);
      const Tensor row = Tensor::of(std::span(logits), {1, kVocab / 2});
      EXPECT_TRUE(sampler.run(row, {&options, 1}, sampled).empty());
      return sampler.sent_bytes();
    };
    EXPECT_EQ(bytes_of({.temperature = 0}), 16) << "a maximum and a sum";
    EXPECT_EQ(bytes_of({.temperature = 1, .uniform = 0.7}), 24) << "and a token";
    EXPECT_EQ(bytes_of({.temperature = 0.5, .top_k = 40, .uniform = 0.7}), 24 + 8 * 40);
    EXPECT_EQ(bytes_of({.temperature = 0.5, .top_p = 0.5}), 24 + 8 * ShardSampler::kMaxCandidates);
  });
}

}  // namespace
}  // namespace tandem
