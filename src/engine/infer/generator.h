// Text generation on a tensor-parallel model with a key/value cache. A prompt is processed in
// blocks of tokens (engine/infer/prefill.h), with the residual stream row-sharded (AG+GEMM,
// GEMM+RS) or replicated on every rank; then one token at a time, with the whole residual row on
// every rank (GEMM+AR).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/infer/prefill.h"
#include "engine/infer/sampling/logits_processors.h"
#include "engine/infer/sampling/sampling.h"
#include "engine/model/config.h"
#include "engine/model/transformer.h"
#include "tandem/communicator.h"
#include "tandem/overlap.h"

namespace tandem {

struct GeneratorOptions {
  DType dtype = DType::f32;
  int64_t block = 32;    ///< max tokens per prefill call
  int64_t capacity = 0;  ///< tokens in the cache, at most config.max_seq; 0: config.max_seq
  OverlapOptions overlap = {};
  CodecPolicy codec = {};  ///< wire format per communication site
  Strategy prefill = Strategy::automatic;
  bool int8_weights = false;  ///< as EngineOptions::int8_weights
};

class Generator {
 public:
  /// Collective over `tp`.
  Generator(Communicator& tp, const ModelConfig& config, const GeneratorOptions& options = {});
  ~Generator();

  /// Sets all weights, as RankModel::set_weights.
  void set_weights(const SetParameter& set);

  int64_t capacity() const;
  /// Tokens in the cache.
  int64_t position() const;
  /// Discards all tokens.
  void reset();
  /// Appends tokens (at least one) and returns the logits after the last, f32 [vocab] on the host,
  /// bitwise equal on every rank; valid until the next call. Throws InvalidArgument for a token
  /// outside the vocabulary or more tokens than the cache has room for.
  Tensor feed(std::span<const int32_t> tokens);

  /// Samples up to `count` tokens after `prompt`; on_token returns false to stop. A prompt longer
  /// than the cache is truncated to its end, leaving room for `count` but keeping at least half a
  /// cache. If the cache is full, the later half of the text is fed again.
  void generate(std::span<const int32_t> prompt, int64_t count, const SamplingOptions& sampling,
                const std::function<bool(int32_t)>& on_token, const LogitsProcessors& rules = {});
  /// Name of the prefill in use, as in prefill.h.
  const std::string& prefill() const;
  /// Statistics of the last `generate`.
  struct Stats {
    double prefill_s = 0;         ///< from the start to the logits after the prompt
    int64_t dropped_prompt = 0;   ///< tokens dropped from the start of the prompt
    int64_t context_refills = 0;  ///< times the cache was full and half of it dropped
  };
  const Stats& stats() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
