#include "engine/model/rotary.h"

#include <cmath>

namespace tandem {
using program::Rotation;
namespace {

/// Factor of both q and k, whose product attention divides by sqrt(head_dim).
double length_of(const ModelConfig& c) {
  if (c.attention_multiplier == 0) return 1;
  return std::sqrt(c.attention_multiplier * std::sqrt(double(c.head_dim)));
}

RopeTable make_table(const Exec& exec, int64_t max_seq, const ModelConfig& c, Rotation rotation) {
  const bool is_local = rotation == Rotation::local;
  const int64_t rotary = rotation == Rotation::none ? 0 : c.rotary_features();
  return RopeTable(exec, max_seq, c.head_dim, is_local ? c.rope_local_theta : c.rope_theta,
                   is_local ? RopeScaling() : c.rope_scaling,
                   {.rotary_dim = rotary, .length = length_of(c)});
}

std::vector<Rotation> rotations_of(const ModelConfig& config) {
  std::vector<Rotation> all{Rotation::usual};
  if (config.no_rope_layer_interval > 0) all.push_back(Rotation::none);
  if (config.rope_local_theta > 0) all.push_back(Rotation::local);
  return all;
}

}  // namespace

RopeTables::RopeTables(const Exec& exec, int64_t max_seq, const ModelConfig& config) {
  for (const Rotation rotation : rotations_of(config)) {
    tables_[size_t(rotation)].emplace(make_table(exec, max_seq, config, rotation));
  }
}

double RopeTables::bytes(int64_t max_seq, const ModelConfig& config) {
  const double features = double(max_seq) * double(config.head_dim);  // cosines and sines
  return double(rotations_of(config).size()) * features * sizeof(float);
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
