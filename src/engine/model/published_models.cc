#include "engine/model/published_models.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "tandem/error.h"

namespace tandem {
namespace {

enum class Family : uint8_t { llama, qwen2, qwen3 };  // biases of q, k and v; norms of q and k

struct PublishedModel {
  std::string_view name, benchmark;  // name in benchmarks; empty: none times it
  Family family;
  int64_t hidden, layers, heads, kv_heads, head_dim, ffn, experts, top_k, vocab, max_seq;
  double rope_theta;
  bool is_tied;
};
// Sizes of config.json in the folders of meta-llama, mistralai and Qwen; ffn is an expert's. Scaled
// rotations of windows beyond 8,192 (Llama 3.1) are left out.
constexpr auto llama = Family::llama, qwen2 = Family::qwen2, qwen3 = Family::qwen3;
constexpr std::array kPublished{
    PublishedModel{"llama-2-7b", "", llama, 4096, 32, 32, 32, 128, 11008, 0, 0, 32000, 4096, 1e4,
                   false},
    PublishedModel{"llama-2-13b", "", llama, 5120, 40, 40, 40, 128, 13824, 0, 0, 32000, 4096, 1e4,
                   false},
    PublishedModel{"llama-2-70b", "", llama, 8192, 80, 64, 8, 128, 28672, 0, 0, 32000, 4096, 1e4,
                   false},
    PublishedModel{"llama-3.2-1b", "llama-1b", llama, 2048, 16, 32, 8, 64, 8192, 0, 0, 128256, 8192,
                   5e5, true},
    PublishedModel{"llama-3.2-3b", "llama-3b", llama, 3072, 28, 24, 8, 128, 8192, 0, 0, 128256,
                   8192, 5e5, true},
    PublishedModel{"llama-3-8b", "llama-8b", llama, 4096, 32, 32, 8, 128, 14336, 0, 0, 128256, 8192,
                   5e5, false},
    PublishedModel{"llama-3-70b", "llama-70b", llama, 8192, 80, 64, 8, 128, 28672, 0, 0, 128256,
                   8192, 5e5, false},
    PublishedModel{"llama-3.1-405b", "", llama, 16384, 126, 128, 8, 128, 53248, 0, 0, 128256, 8192,
                   5e5, false},
    PublishedModel{"mistral-7b", "", llama, 4096, 32, 32, 8, 128, 14336, 0, 0, 32000, 32768, 1e4,
                   false},
    PublishedModel{"mixtral-8x7b", "mixtral-8x7b", llama, 4096, 32, 32, 8, 128, 14336, 8, 2, 32000,
                   32768, 1e6, false},
    PublishedModel{"mixtral-8x22b", "", llama, 6144, 56, 48, 8, 128, 16384, 8, 2, 32000, 65536, 1e6,
                   false},
    PublishedModel{"qwen2.5-7b", "", qwen2, 3584, 28, 28, 4, 128, 18944, 0, 0, 152064, 32768, 1e6,
                   false},
    PublishedModel{"qwen2.5-32b", "", qwen2, 5120, 64, 40, 8, 128, 27648, 0, 0, 152064, 32768, 1e6,
                   false},
    PublishedModel{"qwen2.5-72b", "", qwen2, 8192, 80, 64, 8, 128, 29568, 0, 0, 152064, 32768, 1e6,
                   false},
    PublishedModel{"qwen3-0.6b", "", qwen3, 1024, 28, 16, 8, 128, 3072, 0, 0, 151936, 32768, 1e6,
                   true},
    PublishedModel{"qwen3-1.7b", "", qwen3, 2048, 28, 16, 8, 128, 6144, 0, 0, 151936, 32768, 1e6,
                   true},
    PublishedModel{"qwen3-4b", "", qwen3, 2560, 36, 32, 8, 128, 9728, 0, 0, 151936, 32768, 1e6,
                   true},
    PublishedModel{"qwen3-8b", "qwen3-8b", qwen3, 4096, 36, 32, 8, 128, 12288, 0, 0, 151936, 32768,
                   1e6, false},
    PublishedModel{"qwen3-14b", "", qwen3, 5120, 40, 40, 8, 128, 17408, 0, 0, 151936, 32768, 1e6,
                   false},
    PublishedModel{"qwen3-32b", "", qwen3, 5120, 64, 64, 8, 128, 25600, 0, 0, 151936, 32768, 1e6,
                   false},
    PublishedModel{"qwen3-30b-a3b", "qwen3-30b-a3b", qwen3, 2048, 48, 32, 4, 128, 768, 128, 8,
                   151936, 32768, 1e6, false},
    PublishedModel{"qwen3-235b-a22b", "", qwen3, 4096, 94, 64, 4, 128, 1536, 128, 8, 151936, 32768,
                   1e6, false},
};

/// Keys and values of these are projections of a latent vector.
constexpr std::array<std::string_view, 6> kLatentAttention{
    "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3.1", "deepseek-r1", "kimi-k2"};

}  // namespace

std::vector<std::string> published_models() {
  std::vector<std::string> names;
  for (const PublishedModel& each : kPublished) names.emplace_back(each.name);
  return names;
}

std::vector<std::string> benchmark_models() {
  std::vector<std::string> names;
  for (const PublishedModel& each : kPublished) {
    if (!each.benchmark.empty()) names.emplace_back(each.benchmark);
  }
  return names;
}

std::optional<ModelConfig> find_published_model(std::string_view name) {
  if (std::ranges::find(kLatentAttention, name) != kLatentAttention.end()) {
    throw Unsupported(
        fmt::format("{}: expected a model without multi-head latent attention (MLA), which layers "
                    "of Tandem do not have: one of {}",
                    name, fmt::join(published_models(), ", ")));
  }
  const auto found = std::ranges::find_if(kPublished, [&](const PublishedModel& each) {
    return name == each.name || (name == each.benchmark && !name.empty());
  });
  if (found == kPublished.end()) return std::nullopt;
  ModelConfig config;
  config.vocab = found->vocab;
  config.hidden = found->hidden;
  config.layers = found->layers;
  config.heads = found->heads;
  config.kv_heads = found->kv_heads;
  config.head_dim = found->head_dim;
  config.ffn = found->ffn;
  config.max_seq = found->max_seq;
  config.rope_theta = found->rope_theta;
  config.tie_word_embeddings = found->is_tied;
  config.qkv_bias = found->family == Family::qwen2;
  config.qk_norm = found->family == Family::qwen3;
  config.experts = found->experts;
  config.top_k = std::max<int64_t>(1, found->top_k);
  return config;
}

ModelConfig published_config(const std::string& command, const std::string& model, int64_t layers) {
  const auto found = find_published_model(model);
  if (!found) {
    throw InvalidArgument(fmt::format("{}: --model {}: expected one of {}", command, model,
                                      fmt::join(benchmark_models(), " ")));
  }
  if (layers > found->layers) {
    throw InvalidArgument(fmt::format("{}: --layers {}: expected at most {}'s {}", command, layers,
                                      model, found->layers));
  }
  ModelConfig config = *found;
  if (layers > 0) config.layers = layers;
  config.max_seq = ModelConfig{}.max_seq;
  config.rope_theta = 5e5;
  config.qkv_bias = config.qk_norm = false;
  return config;
}

}  // namespace tandem
