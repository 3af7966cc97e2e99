// Models with weights in int8 compute what models in f32 do that hold the same weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/host_copy.h"
#include "engine/infer/engine.h"
#include "engine/model/initialize.h"
#include "gemm/gemm.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/infer/fed_text.h"
#include "tests/engine/infer/set_weights.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;

enum class Kind : uint8_t { dense, parallel_block, experts, experts_only, clamped_experts };
constexpr Kind kKinds[] = {Kind::dense, Kind::parallel_block, Kind::experts, Kind::experts_only,
                           Kind::clamped_experts};

/// A model whose weights may be in int8 on up to 4 ranks.
ModelConfig int8_model(Kind kind = Kind::dense) {
  ModelConfig config = small_model();
  config.vocab = 257;
  config.max_seq = 100;
  config.hidden = 72;  // a group and a shorter one
  config.heads = 8;
  config.kv_heads = 4;
  config.head_dim = 32;
  config.ffn = 256;
  config.tie_word_embeddings = false;
  config.parallel_block = kind == Kind::parallel_block;
  if (kind == Kind::dense || kind == Kind::parallel_block) return config;
  config.experts = 4;
  config.top_k = 2;
  config.shared_ffn = kind == Kind::experts ? 256 : 0;
  config.shared_expert_gate = kind == Kind::experts;
  config.moe_layer_freq = kind == Kind::experts ? 2 : 1;
  if (kind != Kind::clamped_experts) return config;
  config.router_logit_bias = config.expert_bias = true;
  config.swiglu_limit = 0.5;
  return config;
}

/// Each group of 64 inputs of a row as multiples of its max / 127, rounded up to bf16.
void quantize_rows(std::span<float> weights, int64_t columns) {
  for (size_t row = 0; row < weights.size(); row += size_t(columns)) {
    for (int64_t first = 0; first < columns; first += 64) {
      const auto group =
          weights.subspan(row + size_t(first), size_t(std::min<int64_t>(64, columns - first)));
      float max = 0;
      for (const float w : group) max = std::max(max, std::abs(w));
      BFloat16 scale = BFloat16::from_float(max / 127);
      if (scale.to_float() < max / 127) ++scale.bits;
      for (float& w : group) w = std::round(w / scale.to_float()) * scale.to_float();
    }
  }
}

enum class Stored : uint8_t { int8, dequantized, unquantized };

/// Fills a model; `dequantized`: with what int8 weights hold, in f32.
template <typename Model>
void fill(Model& model, const ModelConfig& config, Communicator& tp, Stored stored) {
  const ModelLayout layout(config, tp.size(), tp.rank());
  std::vector<float> values(size_t(layout.size));
  initialize_parameters({}, layout, config, 17, flat(values));
  const std::span<float> all = values;
  for (float& w : all) w = w == 1 ? w : w * 4;
  for (const Parameter& p : layout.parameters) {
    if (p.name.find("bias") == p.name.npos) continue;
    const LocalShard shard = local_shard(p);
    for (int64_t i = 0; i < shard.columns; ++i) {
      all[size_t(p.offset + i)] =
          normal(3, stream_of(p.name.c_str()), uint64_t(shard.first + i)) / 4;
    }
  }
  const auto quantize = [&](const WeightMatrix& m) {
    if (stored != Stored::dequantized) return;
    quantize_rows(all.subspan(size_t(m.offset), size_t(m.rows * m.columns)), m.columns);
  };
  for (const BranchLayout& b : layout.branches) {
    quantize(b.in), quantize(b.out), quantize(b.experts_in), quantize(b.experts_out);
  }
  quantize(layout.head);
  set_weights(model, {}, all);
}

struct Text {
  std::vector<int32_t> tokens;
  std::vector<double> log_probs;
  bool operator==(const Text&) const = default;
};

std::vector<Request> int8_requests() {
  std::vector<Request> all;
  for (uint64_t i = 0; i < 6; ++i) {
    Request request;
    for (uint64_t j = 0; j < 2 + i * 9; ++j) {
      request.prompt.push_back(int32_t(philox(3, i, j)[0] % 256));
    }
    request.max_tokens = 12;
    request.sampling = {.temperature = i % 2 == 0 ? 0.0 : 0.7, .seed = i};
    all.push_back(request);
  }
  return all;
}

std::vector<Text> write_texts(Engine& engine) {
  std::map<int64_t, Text> texts;
  for (const Request& request : int8_requests()) texts[engine.submit(request)];
  while (!engine.is_idle()) {
    for (const TokenEvent& event : engine.step()) {
      texts[event.request].tokens.push_back(event.token);
      texts[event.request].log_probs.push_back(event.log_prob);
    }
  }
  std::vector<Text> all;
  for (auto& [id, text] : texts) all.push_back(std::move(text));
  return all;
}

/// Largest difference of log-probabilities before the tokens differ.
double farthest_log_prob(const std::vector<Text>& a, const std::vector<Text>& b) {
  double error = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const size_t count = std::min(a[i].tokens.size(), b[i].tokens.size());
    for (size_t j = 0; j < count && a[i].tokens[j] == b[i].tokens[j]; ++j) {
      error = std::max(error, std::abs(a[i].log_probs[j] - b[i].log_probs[j]));
    }
  }
  return error;
}

void on_int8_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  WorldOptions world;
  world.ranks = ranks;
  run_threads(world, [&](Communicator& tp) {
    set_kernel_threads(1);
    body(tp);
  });
}

class Int8Kind : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, Int8Kind, ::testing::ValuesIn(kKinds));

TEST_P(Int8Kind, EngineWritesTheTextsOfTheWeightsThatItHolds) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = int8_model(GetParam());
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int ranks : {1, 2, 4}) {
      if (dtype == DType::bf16 && ranks != 2) continue;
      on_int8_ranks(ranks, [&](Communicator& tp) {
        const auto texts = [&](EngineOptions options, Stored stored) {
          options.int8_weights = stored == Stored::int8;
          Engine engine(tp, config, options);
          fill(engine, config, tp, stored);
          return write_texts(engine);
        };
        const auto expected = texts({.sequences = 4}, Stored::dequantized);
        const auto int8 = texts({.dtype = dtype, .sequences = 4}, Stored::int8);
        const auto separately = texts({.dtype = dtype, .sequences = 1, .rows = 1}, Stored::int8);
        EXPECT_TRUE(int8 == separately) << "texts depend on others";
        const double error = farthest_log_prob(int8, expected);
        EXPECT_LT(error, dtype == DType::f32 ? 2e-4 : 0.3);
        if (dtype != DType::f32) return;
        for (size_t i = 0; i < int8.size(); ++i) EXPECT_EQ(int8[i].tokens, expected[i].tokens);
        if (ranks > 1) return;
        const auto unquantized = texts({.sequences = 4}, Stored::unquantized);
        EXPECT_GT(farthest_log_prob(unquantized, expected), 10 * error) << "weights are not int8";
      });
    }
  }
}

/// Logits after a prompt, which is read in blocks and single tokens, and after each of some more.
std::vector<float> prompt_logits(Communicator& tp, const ModelConfig& config, DType dtype,
                                 Strategy prefill, Stored stored) {
  FedText text(tp, config,
               {.dtype = dtype,
                .block = prefill == Strategy::automatic ? 64 : 24,
                .prefill = prefill,
                .int8_weights = stored == Stored::int8});
  fill(text, config, tp, stored);
  std::vector<float> all;
  const auto feed = [&](std::span<const int32_t> tokens) {
    const auto logits = text.feed(tokens);
    all.insert(all.end(), logits.begin(), logits.end());
  };
  std::vector<int32_t> prompt(50);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = int32_t(i * 37 % 256);
  feed(prompt);
  for (const int32_t token : {1, 200, 7}) feed({&token, 1});
  return all;
}

double farthest_logit(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0;
  for (size_t i = 0; i < a.size(); ++i) error = std::max(error, double(std::abs(a[i] - b[i])));
  return error;
}

TEST_P(Int8Kind, LogitsAreThoseOfTheWeightsInInt8) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = int8_model(GetParam());
  std::vector<float> of_one_rank;
  for (const int ranks : {1, 2, 4}) {
    on_int8_ranks(ranks, [&](Communicator& tp) {
      const auto logits = [&](DType dtype, Strategy prefill, Stored stored) {
        return prompt_logits(tp, config, dtype, prefill, stored);
      };
      const auto expected = logits(DType::f32, Strategy::serial, Stored::dequantized);
      const auto int8 = logits(DType::f32, Strategy::serial, Stored::int8);
      const double error = farthest_logit(int8, expected);
      EXPECT_LT(error, 1e-3);
      if (ranks > 1) {
        EXPECT_EQ(logits(DType::f32, Strategy::overlapped, Stored::int8), int8) << "two chunks";
        EXPECT_EQ(logits(DType::f32, Strategy::automatic, Stored::int8), int8);
        EXPECT_LT(farthest_logit(int8, of_one_rank), 1e-3) << ranks << " ranks";
      } else {
        of_one_rank = int8;
        const auto unquantized = logits(DType::f32, Strategy::serial, Stored::unquantized);
        EXPECT_GT(farthest_logit(unquantized, expected), 10 * error) << "weights are not int8";
        const auto rounded = logits(DType::bf16, Strategy::serial, Stored::int8);
        EXPECT_LT(farthest_logit(rounded, expected), .5);
      }
    });
  }
}

TEST(Int8, WeightsThatWouldCrossRanksAreRefused) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  ModelConfig narrow = int8_model(), experts = int8_model(Kind::experts_only);
  ModelConfig shared = int8_model(Kind::experts);
  narrow.ffn = 192;
  experts.expert_ffn = 96;
  shared.shared_ffn = 192;
  on_int8_ranks(2, [&](Communicator& tp) {
    for (const ModelConfig& config : {narrow, experts, shared}) {
      EXPECT_THROW(Engine(tp, config, {.int8_weights = true}), Unsupported);
    }
  });
}

}  // namespace
}  // namespace tandem
