// Model of one rank for inference: weights, and the cache of keys and values.
#pragma once

#include <cstdint>

#include "engine/infer/decoder.h"

namespace tandem {

struct RankModel {
  /// Collective. `cache.max_tokens` is at most config.max_seq. `is_int8`: GEMMs' weights become
  /// int8 once they are set. Throws InvalidArgument if the cache does not fit into this machine's
  /// memory.
  RankModel(Communicator& tp, const ModelConfig& config, DType dtype, const KvCache::Size& cache,
            const CodecPolicy& codec, bool is_int8 = false);
  RankModel(const RankModel&) = delete;
  /// After weights.values() was written to, with int8 once: it then has no data.
  void parameters_changed();

  ModelConfig config;
  ModelLayout layout;
  Exec exec;
  Weights weights;
  Int8Weights int8;
  RopeTables rope;
  KvCache cache;
  DecoderContext context;
};

/// Throws Unsupported naming the size or dtype of the model that the kernels on GPUs do not take.
void check_gpu_generation(const ModelConfig& config, int tp, DType dtype);

/// Throws InvalidArgument naming the token that is outside the vocabulary, or if there are none.
void check_tokens(const ModelConfig& config, std::span<const int32_t> tokens);

}  // namespace tandem
