// Models with coded weights compute what models in f32 do that hold the same weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
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

struct CodedCase {
  Kind kind;
  WeightFormat format;

  /// Numbers of ranks that divide all groups of the model below.
  std::vector<int> ranks() const {
    return format == WeightFormat::int8 ? std::vector{1, 2, 4} : std::vector{1, 2};
  }
};
constexpr CodedCase kCodedCases[] = {
    {Kind::dense, WeightFormat::int8},           {Kind::parallel_block, WeightFormat::int8},
    {Kind::experts, WeightFormat::int8},         {Kind::experts_only, WeightFormat::int8},
    {Kind::clamped_experts, WeightFormat::int8}, {Kind::dense, WeightFormat::e4m3},
    {Kind::parallel_block, WeightFormat::e4m3},  {Kind::experts, WeightFormat::e4m3}};

ModelConfig coded_model(const CodedCase& coded) {
  const Kind kind = coded.kind;
  ModelConfig config = small_model();
  config.vocab = 257;
  config.max_seq = 100;
  config.hidden = group_of(coded.format) + 8;  // a group and a shorter one
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

/// A group's weights as multiples of its max / 127, rounded up to bf16, or of its max / 448.
void quantize_group(std::span<float> group, WeightFormat format) {
  float max = 0;
  for (const float w : group) max = std::max(max, std::abs(w));
  if (format == WeightFormat::e4m3) {
    const float scale = max / 448;
    for (float& w : group) w = Float8E4M3::from_float(w / scale).to_float() * scale;
    return;
  }
  BFloat16 scale = BFloat16::from_float(max / 127);
  if (scale.to_float() < max / 127) ++scale.bits;
  for (float& w : group) w = std::round(w / scale.to_float()) * scale.to_float();
}

void quantize_rows(std::span<float> weights, int64_t columns, WeightFormat format) {
  const int64_t size = group_of(format);
  for (size_t row = 0; row < weights.size(); row += size_t(columns)) {
    for (int64_t first = 0; first < columns; first += size) {
      quantize_group(weights.subspan(row + size_t(first), size_t(std::min(size, columns - first))),
                     format);
    }
  }
}

enum class Stored : uint8_t { coded, dequantized, unquantized };

struct Fill {
  WeightFormat format;
  Stored stored;  ///< dequantized: what coded weights hold, in f32
  bool head_is_embedding = false;

  std::optional<WeightFormat> weights() const {
    return stored == Stored::coded ? std::optional(format) : std::nullopt;
  }
};

template <typename Model>
void fill(Model& model, const ModelConfig& config, Communicator& tp, const Fill& how) {
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
    if (how.stored != Stored::dequantized) return;
    quantize_rows(all.subspan(size_t(m.offset), size_t(m.rows * m.columns)), m.columns, how.format);
  };
  for (const BranchLayout& b : layout.branches) {
    quantize(b.in), quantize(b.out), quantize(b.experts_in), quantize(b.experts_out);
  }
  quantize(layout.head);
  if (how.head_is_embedding) {
    const WeightMatrix& from = layout.embedding;
    std::copy_n(all.begin() + from.offset, from.rows * from.columns,
                all.begin() + layout.head.offset);
  }
  set_weights(model, {}, all);
}

struct Text {
  std::vector<int32_t> tokens;
  std::vector<double> log_probs;
  bool operator==(const Text&) const = default;
};

std::vector<Request> coded_requests() {
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
  for (const Request& request : coded_requests()) texts[engine.submit(request)];
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

void on_coded_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  WorldOptions world;
  world.ranks = ranks;
  run_threads(world, [&](Communicator& tp) {
    set_kernel_threads(1);
    body(tp);
  });
}

class CodedModel : public ::testing::TestWithParam<CodedCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, CodedModel, ::testing::ValuesIn(kCodedCases));

TEST_P(CodedModel, EngineWritesTheTextsOfTheWeightsThatItHolds) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = coded_model(GetParam());
  const WeightFormat format = GetParam().format;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int ranks : GetParam().ranks()) {
      if (dtype == DType::bf16 && ranks != 2) continue;
      on_coded_ranks(ranks, [&](Communicator& tp) {
        const auto texts = [&](EngineOptions options, Stored stored) {
          const Fill how{format, stored};
          options.weights = how.weights();
          Engine engine(tp, config, options);
          fill(engine, config, tp, how);
          return write_texts(engine);
        };
        const auto expected = texts({.sequences = 4}, Stored::dequantized);
        const auto coded = texts({.dtype = dtype, .sequences = 4}, Stored::coded);
        const auto separately = texts({.dtype = dtype, .sequences = 1, .rows = 1}, Stored::coded);
        EXPECT_TRUE(coded == separately) << "texts depend on others";
        const double error = farthest_log_prob(coded, expected);
        EXPECT_LT(error, dtype == DType::f32 ? 2e-4 : 0.3);
        if (dtype != DType::f32) return;
        for (size_t i = 0; i < coded.size(); ++i) EXPECT_EQ(coded[i].tokens, expected[i].tokens);
        if (ranks > 1) return;
        const auto unquantized = texts({.sequences = 4}, Stored::unquantized);
        EXPECT_GT(farthest_log_prob(unquantized, expected), 10 * error) << "weights are not coded";
      });
    }
  }
}

/// Logits after a prompt, which is read in blocks and single tokens, and after each of some more.
std::vector<float> prompt_logits(Communicator& tp, const ModelConfig& config, DType dtype,
                                 Strategy prefill, const Fill& how) {
  FedText text(tp, config,
               {.dtype = dtype,
                .block = prefill == Strategy::automatic ? 64 : 24,
                .prefill = prefill,
                .weights = how.weights()});
  fill(text, config, tp, how);
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

/// Bounds of a logit's change by quantization, and by bf16, for the model above.
constexpr double kInt8Change = .1, kE4m3Change = .5, kBf16Change = .1;

double farthest_logit(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0;
  for (size_t i = 0; i < a.size(); ++i) error = std::max(error, double(std::abs(a[i] - b[i])));
  return error;
}

/// Number of tokens with a logit that is farther than `bound`.
int tokens_beyond(const std::vector<float>& a, const std::vector<float>& b, int64_t vocab,
                  double bound) {
  int count = 0;
  for (size_t first = 0; first < a.size(); first += size_t(vocab)) {
    double error = 0;
    for (size_t i = first; i < first + size_t(vocab); ++i) {
      error = std::max(error, double(std::abs(a[i] - b[i])));
    }
    count += !(error < bound);
  }
  return count;
}

TEST_P(CodedModel, LogitsAreThoseOfTheCodedWeights) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = coded_model(GetParam());
  const WeightFormat format = GetParam().format;
  std::vector<float> of_one_rank;
  for (const int ranks : GetParam().ranks()) {
    on_coded_ranks(ranks, [&](Communicator& tp) {
      const auto logits = [&](DType dtype, Strategy prefill, Stored stored) {
        return prompt_logits(tp, config, dtype, prefill, Fill{format, stored});
      };
      const auto expected = logits(DType::f32, Strategy::serial, Stored::dequantized);
      const auto coded = logits(DType::f32, Strategy::serial, Stored::coded);
      const double error = farthest_logit(coded, expected);
      EXPECT_LT(error, 1e-3);
      if (ranks > 1) {
        EXPECT_EQ(logits(DType::f32, Strategy::overlapped, Stored::coded), coded) << "two chunks";
        EXPECT_EQ(logits(DType::f32, Strategy::automatic, Stored::coded), coded);
        EXPECT_LT(farthest_logit(coded, of_one_rank), 1e-3) << ranks << " ranks";
      } else {
        of_one_rank = coded;
        const auto unquantized = logits(DType::f32, Strategy::serial, Stored::unquantized);
        EXPECT_GT(farthest_logit(unquantized, expected), 10 * error) << "weights are not coded";
        const auto rounded = logits(DType::bf16, Strategy::serial, Stored::coded);
        const int others = config.moe_layers() > 0 ? 1 : 0;  // a token may have another expert
        const double change = format == WeightFormat::int8 ? kInt8Change : kE4m3Change;
        EXPECT_LE(tokens_beyond(unquantized, expected, config.vocab, change), others);
        EXPECT_LE(tokens_beyond(rounded, expected, config.vocab, kBf16Change), others);
      }
    });
  }
}

/// A tied embedding is looked up as it is, and coded for the head.
TEST(CodedWeights, OfATiedHeadLeaveItsEmbedding) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  for (const WeightFormat format : {WeightFormat::int8, WeightFormat::e4m3}) {
    const ModelConfig untied = coded_model({Kind::dense, format});
    ModelConfig tied = untied;
    tied.tie_word_embeddings = true;
    for (const int ranks : {1, 2}) {
      on_coded_ranks(ranks, [&](Communicator& tp) {
        const auto logits = [&](const ModelConfig& config, bool head_is_embedding) {
          return prompt_logits(tp, config, DType::f32, Strategy::serial,
                               Fill{format, Stored::coded, head_is_embedding});
        };
        EXPECT_EQ(logits(tied, false), logits(untied, true));
        EXPECT_NE(logits(tied, false), logits(untied, false));
      });
    }
  }
}

TEST(CodedWeights, ThatWouldCrossRanksAreRefused) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  constexpr WeightFormat kFormat = WeightFormat::int8;
  ModelConfig narrow = coded_model({Kind::dense, kFormat});
  ModelConfig experts = coded_model({Kind::experts_only, kFormat});
  ModelConfig shared = coded_model({Kind::experts, kFormat});
  narrow.ffn = 192;
  experts.expert_ffn = 96;
  shared.shared_ffn = 192;
  on_coded_ranks(2, [&](Communicator& tp) {
    for (const ModelConfig& config : {narrow, experts, shared}) {
      EXPECT_THROW(Engine(tp, config, {.weights = kFormat}), Unsupported);
    }
    const ModelConfig halves = coded_model({Kind::dense, kFormat});  // 128 of ffn = 256 a rank
    EXPECT_NO_THROW(Engine(tp, halves, {.weights = WeightFormat::e4m3}));
    ModelConfig quarters = halves;
    quarters.ffn = 128;
    EXPECT_NO_THROW(Engine(tp, quarters, {.weights = kFormat}));
    EXPECT_THROW(Engine(tp, quarters, {.weights = WeightFormat::e4m3}), Unsupported);
  });
}

}  // namespace
}  // namespace tandem
