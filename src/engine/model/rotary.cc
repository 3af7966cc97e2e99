#include "engine/model/rotary.h"

#include <cmath>

namespace tandem {
namespace {

/// Factor of both q and k, whose product attention divides by sqrt(head_dim).
double length_of(const ModelConfig& c) {
  if (c.attention_multiplier == 0) return 1;
  return std::sqrt(c.attention_multiplier * std::sqrt(double(c.head_dim)));
}

RopeTable make_table(const Exec& exec, int64_t max_seq, const ModelConfig& c, bool rotates) {
  const int64_t rotary = rotates ? c.rotary_features() : 0;
  return RopeTable(exec, max_seq, c.head_dim, c.rope_theta, c.rope_scaling,
                   {.rotary_dim = rotary, .length = length_of(c)});
}

}  // namespace

RopeTables::RopeTables(const Exec& exec, int64_t max_seq, const ModelConfig& config)
    : rotating_(make_table(exec, max_seq, config, true)) {
  if (config.no_rope_layer_interval > 0) {
    still_.emplace(make_table(exec, max_seq, config, false));
  }
}

std::vector<int32_t> rotary_order(const ModelConfig& c) {
  if (!c.rope_interleaved && c.rotary_features() == c.head_dim) return {};
  const int64_t half = c.head_dim / 2, pairs = c.rotary_features() / 2;
  std::vector<int32_t> order(static_cast<size_t>(c.head_dim));
  for (int64_t i = 0; i < half; ++i) {
    const bool is_rotated = i < pairs;
    const int64_t first = is_rotated ? (c.rope_interleaved ? 2 * i : i) : pairs + i,
                  second = is_rotated ? (c.rope_interleaved ? 2 * i + 1 : pairs + i) : half + i;
    order[size_t(i)] = int32_t(first);
    order[size_t(half + i)] = int32_t(second);
  }
  return order;
}

std::vector<int32_t> inverse_order(const std::vector<int32_t>& order) {
  std::vector<int32_t> inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) inverse[size_t(order[i])] = int32_t(i);
  return inverse;
}

}  // namespace tandem
