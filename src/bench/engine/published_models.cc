#include "bench/engine/published_models.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "tandem/error.h"

namespace tandem {
namespace {

struct PublishedModel {
  const char* name;
  int64_t hidden, layers, heads, kv_heads, head_dim, ffn, experts, top_k, vocab;
  bool is_tied;
};
// Sizes of meta-llama/Llama-3.2-1B and -3B, Llama-3.1-8B and -70B, Qwen/Qwen3-8B, mistralai/
// Mixtral-8x7B-v0.1 and Qwen/Qwen3-30B-A3B. Qwen's norms of queries and keys are left out.
constexpr PublishedModel kPublished[] = {
    {"llama-1b", 2048, 16, 32, 8, 64, 8192, 0, 0, 128256, true},
    {"llama-3b", 3072, 28, 24, 8, 128, 8192, 0, 0, 128256, true},
    {"llama-8b", 4096, 32, 32, 8, 128, 14336, 0, 0, 128256, false},
    {"llama-70b", 8192, 80, 64, 8, 128, 28672, 0, 0, 128256, false},
    {"qwen3-8b", 4096, 36, 32, 8, 128, 12288, 0, 0, 151936, false},
    {"mixtral-8x7b", 4096, 32, 32, 8, 128, 14336, 8, 2, 32000, false},
    {"qwen3-30b-a3b", 2048, 48, 32, 4, 128, 768, 128, 8, 151936, false},
};

}  // namespace

std::vector<std::string> published_models() {
  std::vector<std::string> names;
  for (const auto& each : kPublished) names.emplace_back(each.name);
  return names;
}

ModelConfig published_config(const std::string& command, const std::string& model, int64_t layers) {
  const auto* found = std::ranges::find(kPublished, model, &PublishedModel::name);
  if (found == std::end(kPublished)) {
    std::string known;
    for (const auto& each : kPublished) known += fmt::format(" {}", each.name);
    throw InvalidArgument(fmt::format("{}: --model {}: expected one of{}", command, model, known));
  }
  if (layers > found->layers) {
    throw InvalidArgument(fmt::format("{}: --layers {}: expected at most {}'s {}", command, layers,
                                      model, found->layers));
  }
  ModelConfig config;
  config.vocab = found->vocab;
  config.hidden = found->hidden;
  config.layers = layers > 0 ? layers : found->layers;
  config.heads = found->heads;
  config.kv_heads = found->kv_heads;
  config.head_dim = found->head_dim;
  config.ffn = found->ffn;
  config.rope_theta = 500000;
  config.tie_word_embeddings = found->is_tied;
  config.experts = found->experts;
  config.top_k = std::max<int64_t>(1, found->top_k);
  return config;
}

}  // namespace tandem
