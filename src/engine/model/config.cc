#include "engine/model/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "core/system/printable.h"
#include "engine/model/program/cost.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr double kMaxParameters = 1e15;  // their byte size and offsets fit into 64 bits

[[noreturn]] void reject(std::string_view key, int64_t value, const std::string& expected) {
  throw ConfigError(fmt::format("model.{} = {}: expected {}", key, value, expected));
}

void check_experts(const ModelConfig& c, int ep) {
  if (c.experts < 0 || c.experts > 1 << 16) reject("experts", c.experts, "0 to 65536");
  if (c.experts == 0 && ep > 1) {
    reject("experts", c.experts, fmt::format("some, for parallel.ep = {}", ep));
  }
  if (c.experts == 0 &&
      (c.router_logit_bias || c.expert_bias || c.fused_experts || c.swiglu_limit != 0)) {
    reject("experts", c.experts,
           "some, for router_logit_bias, expert_bias, fused_experts or swiglu_limit");
  }
  if (c.experts == 0) return;
  if (c.experts % ep != 0) {
    reject("experts", c.experts, fmt::format("a multiple of parallel.ep = {}", ep));
  }
  if (c.top_k < 1 || c.top_k > c.experts) {
    reject("top_k", c.top_k, fmt::format("1 to model.experts = {}", c.experts));
  }
  if (c.moe_layer_freq < 1 || c.moe_layer_freq > c.layers) {
    reject("moe_layer_freq", c.moe_layer_freq, fmt::format("1 to model.layers = {}", c.layers));
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
  const auto is_rate = [](double x) { return x >= 0 && std::isfinite(x); };
  if (!(c.route_scale > 0) || !is_rate(c.route_scale) || !is_rate(c.aux_loss_coeff) ||
      !is_rate(c.router_bias_update_rate)) {
    throw ConfigError(
        fmt::format("model.route_scale = {}, aux_loss_coeff = {}, router_bias_update_rate = {}: "
                    "expected above 0, and none below 0",
                    c.route_scale, c.aux_loss_coeff, c.router_bias_update_rate));
  }
  if (!(c.swiglu_limit >= 0 && c.swiglu_limit <= 1e6) ||
      !(c.swiglu_alpha >= 1e-6 && c.swiglu_alpha <= 1e6)) {
    throw ConfigError(
        fmt::format("model.swiglu_limit = {}, swiglu_alpha = {}: expected 0 (SwiGLU) to 1e6, and "
                    "1e-6 to 1e6",
                    c.swiglu_limit, c.swiglu_alpha));
  }
  if (c.parallel_block) {
    throw ConfigError("model.parallel_block = true: expected false where model.experts is above 0");
  }
}

void check_factors(const ModelConfig& c) {
  const auto check = [](const char* key, double value, double low) {
    if (value >= low && value <= 1e6) return;
    throw ConfigError(fmt::format("model.{} = {}: expected {} to 1e6", key, value, low));
  };
  check("embedding_multiplier", c.embedding_multiplier, 1e-6);
  check("residual_multiplier", c.residual_multiplier, 1e-6);
  check("logits_scaling", c.logits_scaling, 1e-6);
  check("attention_multiplier", c.attention_multiplier, 0);
  if (c.stream_eps() < kMinEpsilon) {
    throw ConfigError(fmt::format(
        "model.norm_eps = {} with embedding_multiplier = {}: expected a quotient of at least {}",
        c.norm_eps, c.embedding_multiplier, kMinEpsilon));
  }
  if (c.experts > 0 && c.branch_scale() != 1) {
    throw ConfigError(
        fmt::format("model.residual_multiplier = {}, embedding_multiplier = {}: expected 1 where "
                    "model.experts is above 0",
                    c.residual_multiplier, c.embedding_multiplier));
  }
}

void check_functions(const ModelConfig& c) {
  for (const auto& [key, cap] : {std::pair("attention_softcap", c.attention_softcap),
                                 std::pair("logits_softcap", c.logits_softcap)}) {
    if (cap == 0 || (cap >= 1e-3 && cap <= 1e6)) continue;
    throw ConfigError(fmt::format("model.{} = {}: expected 0 (none) or 0.001 to 1e6", key, cap));
  }
  const std::string& name = c.mlp_activation;
  if (name != "silu" && name != "gelu_pytorch_tanh") {
    throw ConfigError(fmt::format("model.mlp_activation = {}: expected silu or gelu_pytorch_tanh",
                                  printable(name)));
  }
  if (c.experts > 0 && name != "silu") {
    throw ConfigError(fmt::format(
        "model.mlp_activation = {}: expected silu where model.experts is above 0", name));
  }
}

void check_norms(const ModelConfig& c) {
  if (!(c.norm_eps >= kMinEpsilon && c.norm_eps <= 1)) {
    throw ConfigError(
        fmt::format("model.norm_eps = {}: expected {} to 1", c.norm_eps, kMinEpsilon));
  }
  const std::string& position = c.norm_position;
  if (position != "pre" && position != "post" && position != "both") {
    throw ConfigError(
        fmt::format("model.norm_position = {}: expected pre, post or both", printable(position)));
  }
  if (c.qk_norm_all_heads && !c.qk_norm) {
    throw ConfigError("model.qk_norm_all_heads = true: expected model.qk_norm = true");
  }
  const auto expect_pre = [&](const std::string& other) {
    throw ConfigError(
        fmt::format("model.norm_position = {}: expected pre where {}", position, other));
  };
  if (c.has_post_norm() && c.experts > 0) expect_pre("model.experts is above 0");
  if (c.has_post_norm() && c.parallel_block) expect_pre("model.parallel_block is true");
  if (!c.has_pre_norm() && c.embedding_multiplier != 1) {
    throw ConfigError(
        fmt::format("model.embedding_multiplier = {}: expected 1 where model.norm_position is post",
                    c.embedding_multiplier));
  }
}

void check_rope(const ModelConfig& c) {
  if (c.no_rope_layer_interval < 0 || c.no_rope_layer_interval == 1) {
    reject("no_rope_layer_interval", c.no_rope_layer_interval, "0 (none) or at least 2");
  }
  if (c.rotary_dim < 0 || c.rotary_dim >= c.head_dim || c.rotary_dim % 2 != 0) {
    reject("rotary_dim", c.rotary_dim,
           fmt::format("0 (all) or an even number below model.head_dim = {}", c.head_dim));
  }
  if (!(c.rope_theta >= 1 && c.rope_theta <= 1e15)) {
    throw ConfigError(fmt::format("model.rope_theta = {}: expected 1 to 1e15", c.rope_theta));
  }
  if (c.rope_local_theta != 0 && c.sliding_window == 0) {
    throw ConfigError(
        fmt::format("model.rope_local_theta = {}: expected 0 where model.sliding_window is 0",
                    c.rope_local_theta));
  }
  if (c.rope_local_theta != 0 && !(c.rope_local_theta >= 1 && c.rope_local_theta <= 1e15)) {
    throw ConfigError(fmt::format("model.rope_local_theta = {}: expected 0 (none) or 1 to 1e15",
                                  c.rope_local_theta));
  }
  const RopeScaling& s = c.rope_scaling;
  constexpr std::string_view kTypes[] = {"default", "linear", "dynamic", "llama3", "yarn"};
  if (std::ranges::find(kTypes, s.type) == std::end(kTypes)) {
    throw ConfigError(fmt::format("model.rope_type = {}: expected {}", printable(s.type),
                                  fmt::join(kTypes, ", ")));
  }
  if (s.is_none()) return;
  const auto check = [](const char* key, double value, double low, double high) {
    if (value >= low && value <= high) return;
    throw ConfigError(fmt::format("model.rope_{} = {}: expected {} to {}", key, value, low, high));
  };
  constexpr double kMax = 1e9, kMin = 1e-6;
  check("factor", s.factor, 1, kMax);
  if (s.type == "llama3") {
    check("original_max_seq", s.original_max_seq, 1, kMax);
    check("low_freq_factor", s.low_freq_factor, kMin, kMax);
    check("high_freq_factor", s.high_freq_factor, s.low_freq_factor + kMin, kMax);
  }
  if (s.type == "yarn") {
    check("original_max_seq", s.original_max_seq, 1, kMax);
    check("beta_slow", s.beta_slow, kMin, kMax);
    check("beta_fast", s.beta_fast, s.beta_slow, kMax);
    check("attention_factor", s.attention_factor, kMin, kMax);
    if (c.rope_theta < 1.001) {
      throw ConfigError(
          fmt::format("model.rope_theta = {}: expected at least 1.001 with yarn", c.rope_theta));
    }
  }
}

}  // namespace

int64_t ModelConfig::parameters() const {
  return vocab * hidden * (tie_word_embeddings ? 1 : 2) + hidden +
         int64_t(program::layer_parameters(*this));
}

double ModelConfig::flops_per_token(int64_t seq) const {
  return 6 * (program::layer_products(*this, seq) + double(vocab * hidden));
}

const char* ModelConfig::flops_formula() const {
  if (sliding_window > 0) {
    return "6 x (layer matrices + head) + 6 x heads x head_dim x, summed over the layers, seq or, "
           "with a window w, 2 w - w^2 / seq";
  }
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
  if (kv_heads % tp != 0 && tp % kv_heads != 0) {
    reject("kv_heads", kv_heads, fmt::format("a multiple or a divisor of tp = {}", tp));
  }
  check_experts(*this, ep);
  if (shared_expert_gate && (experts == 0 || shared_ffn == 0)) {
    throw ConfigError("a gate of the shared expert without one: expected experts and shared_ffn");
  }
  if (sliding_window < 0 || sliding_window > int64_t{1} << 31) {
    reject("sliding_window", sliding_window, "0 (none) to 2^31");
  }
  if (full_attention_freq != 0 && sliding_window == 0) {
    reject("full_attention_freq", full_attention_freq, "0 where model.sliding_window is 0");
  }
  if (full_attention_freq < 0 || full_attention_freq == 1 || full_attention_freq > layers) {
    reject("full_attention_freq", full_attention_freq,
           fmt::format("0 (none) or 2 to model.layers = {}", layers));
  }
  if (const int64_t end = sliding_window > 0 ? layers : 1;
      first_window_layer < 0 || first_window_layer >= end) {
    reject("first_window_layer", first_window_layer, fmt::format("0 to {}", end - 1));
  }
  if (first_window_layer > 0 && full_attention_freq > 0) {
    reject("first_window_layer", first_window_layer, "0 with model.full_attention_freq");
  }
  if (const double usual = ModelConfig{}.swiglu_alpha; swiglu_limit == 0 && swiglu_alpha != usual) {
    throw ConfigError(fmt::format(
        "model.swiglu_alpha = {}: expected {} where model.swiglu_limit is 0", swiglu_alpha, usual));
  }
  check_rope(*this);
  check_functions(*this);
  check_norms(*this);
  check_factors(*this);
  const double weights = 2 * double(vocab) * double(hidden) + program::layer_parameters(*this);
  if (weights > kMaxParameters) {
    throw ConfigError(fmt::format("a model of {:.3g} parameters: expected at most {:.3g}", weights,
                                  kMaxParameters));
  }
}

void ModelConfig::check_training(int tp, int ep) const {
  check(tp, ep);
  if (kv_heads % tp != 0) {
    reject("kv_heads", kv_heads, fmt::format("a multiple of tp = {} in training", tp));
  }
}

}  // namespace tandem
