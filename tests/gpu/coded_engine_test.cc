// Generation with coded weights on GPU ranks against the same weights on CPU ranks.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/infer/engine.h"
#include "gemm/cuda/coded_gemm.h"
#include "tandem/error.h"
#include "tests/engine/infer/engine_cases.h"
#include "tests/engine/infer/fed_text.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

constexpr WeightFormat kFormats[] = {WeightFormat::int8, WeightFormat::e4m3};

/// A model whose groups of inputs 1 and 2 ranks divide.
ModelConfig gpu_coded_model() {
  ModelConfig config = engine_model(kVariants[0]);
  config.vocab = 288;
  config.max_seq = 1000;
  config.hidden = 136;  // a group and a shorter one
  config.heads = config.kv_heads = 4;
  config.head_dim = 64;
  config.ffn = 256;
  return config;
}

class GpuCoded : public OnGpus {
 protected:
  void on_gpus(const std::function<void(Communicator&)>& body) const {
    run_gpus({ranks(), {}, 60, ranks_per_gpu(ranks())}, [&](Communicator& tp) {
      if (!gpu::has_coded_gemm()) GTEST_SKIP() << "needs a Hopper GPU";
      body(tp);
    });
  }
};

/// Logits after a prompt in steps of `block` tokens, and after single tokens.
std::vector<float> logits_of_text(Communicator& tp, const ModelConfig& config,
                                  const FedTextOptions& options) {
  FedText text(tp, config, options);
  fill_engine(text, config, tp);
  std::vector<float> all;
  const auto feed = [&](std::span<const int32_t> tokens) {
    const std::vector<float> logits = text.feed(tokens);
    all.insert(all.end(), logits.begin(), logits.end());
  };
  std::vector<int32_t> prompt(700);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = int32_t(i * 37 % 256);
  feed(prompt);
  for (const int32_t token : {1, 200, 7, 90}) feed({&token, 1});
  return all;
}

double farthest(const std::vector<float>& a, const std::vector<float>& b) {
  double error = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = std::abs(double(a[i]) - double(b[i]));
    error = std::isnan(difference) ? INFINITY : std::max(error, difference);
  }
  return error;
}

/// Errors of logits on a GPU in bf16, by tokens of a step: decode's kernel, cuBLASLt, sharded rows.
struct LogitErrors {
  static constexpr int64_t kBlocks[] = {1, 40, 100, 700};
  std::array<double, std::size(kBlocks)> of_block;
  double largest;  ///< magnitude of a logit
};

// Compares with the same model without coded weights, which says what bf16 costs.
TEST_P(GpuCoded, LogitsAreAsCloseToTheCpusAsInBf16) {
  const ModelConfig config = gpu_coded_model();
  const auto errors = [&](std::optional<WeightFormat> format) {
    std::vector<float> expected;
    run_threads(
        {}, [&](Communicator& tp) { expected = logits_of_text(tp, config, {.weights = format}); });
    LogitErrors result{};
    for (const float logit : expected) {
      result.largest = std::max(result.largest, double(std::abs(logit)));
    }
    on_gpus([&](Communicator& tp) {
      for (size_t i = 0; i < std::size(LogitErrors::kBlocks); ++i) {
        const std::vector<float> found = logits_of_text(
            tp, config,
            {.dtype = DType::bf16, .block = LogitErrors::kBlocks[i], .weights = format});
        if (tp.rank() == 0) result.of_block[i] = farthest(found, expected);
      }
    });
    return result;
  };
  const LogitErrors uncoded = errors(std::nullopt);
  for (const WeightFormat format : kFormats) {
    const LogitErrors coded = errors(format);
    for (size_t i = 0; i < std::size(LogitErrors::kBlocks); ++i) {
      EXPECT_LE(coded.of_block[i], 2 * uncoded.of_block[i] + 0.01 * coded.largest)
          << name_of(format) << ", steps of " << LogitErrors::kBlocks[i];
    }
  }
}

TEST_P(GpuCoded, BatchInvariantBitsDoNotDependOnTheBatch) {
  if (ranks() > 1) GTEST_SKIP() << "one GPU rank";
  const ModelConfig config = gpu_coded_model();
  const std::vector<Request> requests = random_requests(10, 3, 150, 40);
  for (const WeightFormat format : kFormats) {
    on_gpus([&](Communicator& tp) {
      const auto texts = [&](int64_t sequences, int64_t rows, const std::vector<Request>& some) {
        Engine engine(tp, config,
                      {.dtype = DType::bf16,
                       .sequences = sequences,
                       .rows = rows,
                       .batch_invariant = true,
                       .weights = format});
        fill_engine(engine, config, tp);
        return run_all(engine, some, {uint64_t(rows)});
      };
      std::vector<Written> expected;
      for (const Request& request : requests) expected.push_back(texts(1, 1, {request})[0]);
      for (const auto& [sequences, rows] : {std::pair<int64_t, int64_t>{3, 17}, {10, 300}}) {
        const std::vector<Written> found = texts(sequences, rows, requests);
        for (size_t i = 0; i < found.size(); ++i) {
          EXPECT_TRUE(found[i] == expected[i])
              << name_of(format) << ", request " << i << ", " << sequences << " at once";
        }
      }
    });
  }
}

/// Texts of requests that are submitted before the first step of a new engine.
struct TextsAtOnce {
  std::vector<Written> texts;
  size_t max_events = 0;  ///< of a step
  int64_t rows = 0;       ///< of that step

  TextsAtOnce(Engine& engine, const std::vector<Request>& requests) : texts(requests.size()) {
    for (const Request& request : requests) engine.submit(request);
    for (int step = 0; !engine.is_idle(); ++step) {
      if (step == kMaxIdleSteps) throw std::logic_error("requests do not end");
      const int64_t rows_before = engine.stats().rows;
      const std::vector<TokenEvent> events = engine.step();
      for (const TokenEvent& event : events) texts[size_t(event.request)].add(event);
      if (events.size() <= max_events) continue;
      max_events = events.size(), rows = engine.stats().rows - rows_before;
    }
  }
};

/// Number of first tokens that are the same. Expects log-probabilities up to the first token that
/// differs, with it, to be close: products of other numbers of rows have other bits.
size_t count_same(const Written& found, const Written& expected) {
  constexpr double kBound = 0.2;  // weights are exact, or rounded to bf16
  const size_t count = std::min(found.tokens.size(), expected.tokens.size());
  for (size_t i = 0; i < count; ++i) {
    EXPECT_LE(std::abs(found.log_probs[i] - expected.log_probs[i]), kBound) << "token " << i;
    if (found.tokens[i] != expected.tokens[i]) return i;
  }
  return count;
}

TEST_P(GpuCoded, MoreTextsAtOnceThanFewRowsAreWritten) {
  if (ranks() > 1) GTEST_SKIP() << "one GPU rank";
  ModelConfig config = gpu_coded_model();
  config.hidden = 256;  // whole groups: no padding in the bytes
  constexpr size_t kTokens = 20;
  std::vector<Request> requests = random_requests(80, 4, 12, 10);
  for (Request& request : requests) {
    request.max_tokens = kTokens, request.sampling = {.temperature = 0};
    request.stops = {}, request.eos_token_ids = {-1};
  }
  on_gpus([&](Communicator& tp) {
    const auto make = [&](int64_t sequences, int64_t rows) {
      const EngineOptions options{.dtype = DType::bf16,
                                  .sequences = sequences,
                                  .rows = rows,
                                  .weights = WeightFormat::int8};
      auto made = std::make_unique<Engine>(tp, config, options);
      fill_engine(*made, config, tp);
      return made;
    };
    std::unique_ptr<Engine> engine = make(80, 160);
    const TextsAtOnce found(*engine, requests);
    EXPECT_GT(found.max_events, size_t(kMaxFewRows));
    EXPECT_GT(found.rows, kMaxFewRows);
    const size_t in_bf16 = 2 * size_t(config.parameters());
    EXPECT_LT(engine->weight_bytes(), in_bf16 * 3 / 4);
    engine.reset();
    engine = make(8, kMaxFewRows);
    const std::vector<Written> expected = run_all(*engine, requests, {160});
    size_t num_same = 0;  // texts that are the same up to where all are written at once
    for (size_t i = 0; i < requests.size(); ++i) {
      SCOPED_TRACE(i);
      const Written& text = found.texts[i];
      EXPECT_EQ(text.tokens.size(), kTokens);
      EXPECT_TRUE(std::ranges::all_of(text.log_probs, [](double p) { return std::isfinite(p); }));
      num_same += size_t(count_same(text, expected[i]) > 6);
    }
    EXPECT_GT(num_same, requests.size() / 4);
  });
}

TEST_P(GpuCoded, WhatGpusDoNotTakeIsRefused) {
  const ModelConfig config = gpu_coded_model();
  ModelConfig experts = config;
  experts.experts = 4;
  experts.top_k = 2;
  on_gpus([&](Communicator& tp) {
    const auto make = [&](const ModelConfig& model, DType dtype) {
      Engine engine(tp, model, {.dtype = dtype, .weights = WeightFormat::int8});
    };
    EXPECT_THROW(make(config, DType::f32), Unsupported);
    EXPECT_THROW(make(experts, DType::bf16), Unsupported);
    EXPECT_NO_THROW(make(config, DType::bf16));
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, GpuCoded, ::testing::Values(1, 2), gpus_name);

}  // namespace
}  // namespace tandem::test
