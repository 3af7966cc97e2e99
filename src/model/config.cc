#include "model/config.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "core/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

[[noreturn]] void reject(std::string_view key, int64_t value, const std::string& expected) {
  throw ConfigError(fmt::format("model.{} = {}: expected {}", key, value, expected));
}

/// Weights of the products of all layers, with `experts` experts of each that has any.
int64_t layer_matrices(const ModelConfig& c, int64_t experts) {
  const int64_t moe = c.moe_layers();
  return c.layers * c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads) +
         (c.layers - moe) * 3 * c.hidden * c.ffn +
         moe * c.hidden * (3 * (experts * c.ffn_of_expert() + c.shared_ffn) + c.experts);
}

void check_experts(const ModelConfig& c, int ep) {
  if (c.experts < 0 || c.experts > 1 << 16) reject("experts", c.experts, "0 to 65536");
  if (c.experts == 0 && ep > 1) {
    reject("experts", c.experts, fmt::format("some, for parallel.ep = {}", ep));
  }
  if (c.experts == 0) return;
  if (c.experts % ep != 0) {
    reject("experts", c.experts, fmt::format("a multiple of parallel.ep = {}", ep));
  }
  if (c.top_k < 1 || c.top_k > c.experts) {
    reject("top_k", c.top_k, fmt::format("1 to model.experts = {}", c.experts));
  }
  if (c.moe_every < 1 || c.moe_every > c.layers) {
    reject("moe_every", c.moe_every, fmt::format("1 to model.layers = {}", c.layers));
  }
  if (c.expert_ffn < 0 || c.expert_ffn > int64_t{1} << 31) {
    reject("expert_ffn", c.expert_ffn, "0 (ffn) to 2^31");
  }
  if (c.shared_ffn < 0 || c.shared_ffn > int64_t{1} << 31) {
    reject("shared_ffn", c.shared_ffn, "0 (none) to 2^31");
  }
  if (c.router != "softmax" && c.router != "sigmoid") {
    throw ConfigError(
        fmt::format("model.router = {}: expected softmax or sigmoid", printable(c.router)));
  }
  if (!(c.route_scale > 0) || !(c.aux_loss >= 0) || !(c.bias_rate >= 0)) {
    throw ConfigError(fmt::format(
        "model.route_scale = {}, aux_loss = {}, bias_rate = {}: expected above 0, and none below 0",
        c.route_scale, c.aux_loss, c.bias_rate));
  }
  if (c.parallel_block) {
    throw ConfigError("model.parallel_block = true: expected false where model.experts is above 0");
  }
}

}  // namespace

int64_t ModelConfig::parameters() const {
  const int64_t norms = hidden * (1 + layers * (parallel_block ? 1 : 2));
  return vocab * hidden * (tied_head ? 1 : 2) + layer_matrices(*this, experts) + norms +
         (bias_rate > 0 ? moe_layers() * experts : 0);
}

double ModelConfig::flops_per_token(int64_t seq) const {
  const double products = double(layer_matrices(*this, top_k) + vocab * hidden);
  return 6 * products + 6 * double(layers * heads * head_dim) * double(seq);
}

const char* ModelConfig::flops_formula() {
  return "6 x (layer matrices + head) + 6 x layers x heads x head_dim x seq (causal attention)";
}

void ModelConfig::check(int tp, int ep) const {
  if (tp < 1) throw InvalidArgument(fmt::format("tp {}: expected at least 1", tp));
  const std::pair<const char*, int64_t> sizes[] = {
      {"vocab", vocab},       {"hidden", hidden},     {"layers", layers}, {"heads", heads},
      {"kv_heads", kv_heads}, {"head_dim", head_dim}, {"ffn", ffn},       {"max_seq", max_seq}};
  for (const auto& [key, value] : sizes) {
    if (value < 1 || value > (int64_t{1} << 31)) reject(key, value, "between 1 and 2^31");
  }
  if (head_dim % 2 != 0) reject("head_dim", head_dim, "an even number");
  if (heads % kv_heads != 0) {
    reject("kv_heads", kv_heads, fmt::format("a divisor of heads = {}", heads));
  }
  if (heads % tp != 0) reject("heads", heads, fmt::format("a multiple of tp = {}", tp));
  if (kv_heads % tp != 0) reject("kv_heads", kv_heads, fmt::format("a multiple of tp = {}", tp));
  check_experts(*this, ep);
  if (!(rope_theta > 0)) {
    throw ConfigError(fmt::format("model.rope_theta = {}: expected above 0", rope_theta));
  }
  if (!(norm_eps > 0)) {
    throw ConfigError(fmt::format("model.norm_eps = {}: expected above 0", norm_eps));
  }
}

}  // namespace tandem
