#include "engine/train/gpu_training.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem {

void check_gpu_training(const TrainConfig& config) {
  const auto& model = config.model;
  const auto& parallel = config.parallel;
  if (model.experts > 0) {
    throw ConfigError(fmt::format(
        "model.experts = {}: expected 0 on GPUs (experts train on CPU ranks)", model.experts));
  }
  if (parallel.dp > 1) {
    throw ConfigError(fmt::format(
        "parallel.dp = {}: expected 1 on GPUs (replicas train on CPU ranks)", parallel.dp));
  }
  if (parallel.chunks != 0) {
    throw ConfigError(fmt::format(
        "parallel.chunks = {}: expected 0 on GPUs, where the tuner chooses", parallel.chunks));
  }
  // Rows of every GEMM operand are multiples of 16 bytes.
  const int64_t unit = 8 * parallel.tp;
  const auto check = [&](const char* key, int64_t value, int64_t expected) {
    if (value % expected == 0) return;
    throw ConfigError(
        fmt::format("{} = {}: expected a multiple of {} on GPUs", key, value, expected));
  };
  check("model.vocab", model.vocab, unit);
  check("model.hidden", model.hidden, 8);
  check("model.ffn", model.ffn, unit);
  check("model.head_dim", model.head_dim, 8);
  if (model.head_dim > 128) {
    throw ConfigError(
        fmt::format("model.head_dim = {}: expected at most 128 on GPUs", model.head_dim));
  }
}

}  // namespace tandem
