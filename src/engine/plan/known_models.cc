#include "engine/plan/known_models.h"

#include <array>
#include <cctype>
#include <cmath>
#include <string>
#include <string_view>

namespace tandem::plan {
namespace {

struct KnownModel {
  std::string_view name;  ///< lower case, letters and digits
  double layers, hidden, heads, kv_heads, head_dim, ffn, vocab;
  double experts = 0, top_k = 0, shared_experts = 0, attention_weights = 0;
  double moe_layer_share = 1, dense_layers = 0, dense_ffn = 0;
  double expert_hosts = 0;  ///< a token's experts are on so many hosts at most; 0: on any
};

// Multi-head latent attention of DeepSeek: weights of a layer by its published ranks; the head
// dimension is the mean of 192 (scores) and 128 (values).
constexpr double kDeepSeekV2Attention = 149.2e6, kDeepSeekV3Attention = 187.1e6;

constexpr std::array kModels{
    KnownModel{"gpt35b", 24, 4096, 32, 32, 128, 16384, 51200},
    KnownModel{"gpt320b", 44, 6144, 48, 48, 128, 24576, 51200},
    KnownModel{"nemotron8b", 32, 4096, 32, 32, 128, 16384, 256000},
    KnownModel{"nemotron22b", 40, 6144, 48, 48, 128, 24576, 256000},
    KnownModel{"grok1", 64, 6144, 48, 8, 128, 32768, 131072, 8, 2},
    KnownModel{"qwen330b", 48, 2048, 32, 4, 128, 768, 151936, 128, 8},
    KnownModel{"qwen3235b", 94, 4096, 64, 4, 128, 1536, 151936, 128, 8},
    KnownModel{"gptoss120b", 36, 2880, 64, 8, 64, 2880, 201088, 128, 4},
    KnownModel{"deepseekv2", 60, 5120, 128, 128, 160, 1536, 102400, 160, 6, 2, kDeepSeekV2Attention,
               1, 1, 12288, 3},
    KnownModel{"deepseekv3", 61, 7168, 128, 128, 160, 2048, 129280, 256, 8, 1, kDeepSeekV3Attention,
               1, 3, 18432, 4},
    // Every other layer is dense, with twice the FFN: a token uses the same number of weights.
    KnownModel{"llama4maverick", 48, 5120, 40, 8, 128, 8192, 202048, 128, 1, 1, 0, .5},
};

constexpr std::array<std::string_view, 7> kGated{"llama",    "qwen", "mixtral", "mistral",
                                                 "deepseek", "grok", "gptoss"};

std::string normalized(std::string_view name) {
  std::string text;
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)))
      text += char(std::tolower(static_cast<unsigned char>(c)));
  }
  return text;
}

void fill(double& value, double known) {
  if (value == 0) value = known;
}

}  // namespace

void complete_model(RunRow& row) {
  const std::string name = normalized(row.model);
  for (const std::string_view family : kGated) row.gated = row.gated || name.starts_with(family);
  for (const KnownModel& known : kModels) {
    if (!name.starts_with(known.name)) continue;
    fill(row.layers, known.layers);
    fill(row.hidden, known.hidden);
    fill(row.heads, known.heads);
    fill(row.kv_heads, known.kv_heads);
    fill(row.head_dim, known.head_dim);
    fill(row.ffn, known.ffn);
    fill(row.vocab, known.vocab);
    fill(row.experts, known.experts);
    fill(row.top_k, known.top_k);
    fill(row.shared_experts, known.shared_experts);
    row.attention_weights = known.attention_weights;
    row.moe_layer_share = known.moe_layer_share;
    row.dense_layers = std::ceil(known.dense_layers * row.layers / known.layers);
    row.dense_ffn = known.dense_ffn;
    row.expert_hosts = known.expert_hosts;
  }
  fill(row.kv_heads, row.heads);
  if (row.heads > 0) fill(row.head_dim, row.hidden / row.heads);
}

}  // namespace tandem::plan
