#include "model/config.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "tandem/error.h"

namespace tandem {
namespace {

[[noreturn]] void reject(std::string_view key, int64_t value, const std::string& expected) {
  throw ConfigError(fmt::format("model.{} = {}: expected {}", key, value, expected));
}

/// Weights of the products of one layer.
int64_t layer_matrices(const ModelConfig& c) {
  return c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + 3 * c.hidden * c.ffn;
}

}  // namespace

int64_t ModelConfig::parameters() const {
  const int64_t norms = hidden * (1 + layers * (parallel_block ? 1 : 2));
  return vocab * hidden * (tied_head ? 1 : 2) + layers * layer_matrices(*this) + norms;
}

double ModelConfig::flops_per_token(int64_t seq) const {
  const double products = double(layers * layer_matrices(*this) + vocab * hidden);
  return 6 * products + 6 * double(layers * heads * head_dim) * double(seq);
}

const char* ModelConfig::flops_formula() {
  return "6 x (layer matrices + head) + 6 x layers x heads x head_dim x seq (causal attention)";
}

void ModelConfig::check(int tp) const {
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
  if (!(rope_theta > 0)) {
    throw ConfigError(fmt::format("model.rope_theta = {}: expected above 0", rope_theta));
  }
  if (!(norm_eps > 0)) {
    throw ConfigError(fmt::format("model.norm_eps = {}: expected above 0", norm_eps));
  }
}

}  // namespace tandem
