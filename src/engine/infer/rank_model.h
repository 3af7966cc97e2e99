// Model of one rank for inference: weights, and the cache of keys and values.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "engine/infer/decoder.h"

namespace tandem {

struct RankModel {
  /// Collective. `cache.max_tokens` is at most config.max_seq. Each matrix is kept once, in
  /// `dtype`, or, of GEMMs, in `format` if there is one; norms, biases and routers are in f32.
  /// Throws InvalidArgument if the weights and the cache of the CPU ranks of a host do not fit into
  /// its memory.
  RankModel(Communicator& tp, const ModelConfig& config, DType dtype, const KvCache::Size& cache,
            const CodecPolicy& codec, std::optional<WeightFormat> format = {});
  RankModel(const RankModel&) = delete;
  /// Sets all weights: set(p, views) writes each parameter's shard, a tied embedding twice if
  /// weights are coded. Beyond the weights, memory is needed for `set` and, with coded weights, one
  /// matrix in f32.
  void set_weights(const SetParameter& set);
  /// Bytes of the weights' memory.
  size_t weight_bytes() const { return weights.bytes() + (coded ? coded->bytes() : 0); }

  ModelConfig config;
  ModelLayout layout;
  Exec exec;
  Weights weights;
  std::unique_ptr<CodedWeights> coded;
  RopeTables rope;
  KvCache cache;
  DecoderContext context;
};

/// Throws Unsupported naming the size, dtype or weights of the model that the kernels on GPUs do
/// not take.
void check_gpu_generation(const ModelConfig& config, int tp, DType dtype,
                          std::optional<WeightFormat> format = {});
/// Bytes of a model's weights, on all ranks.
double weight_bytes(const ModelConfig& config, DType dtype, std::optional<WeightFormat> format);
/// Bytes of a rank's weights on a GPU, with the memory that coded ones take while they are loaded.
double gpu_weight_bytes(const ModelConfig& config, int tp, DType dtype,
                        std::optional<WeightFormat> format);

/// Throws InvalidArgument naming the token that is outside the vocabulary, or if there are none.
void check_tokens(const ModelConfig& config, std::span<const int32_t> tokens);

}  // namespace tandem
