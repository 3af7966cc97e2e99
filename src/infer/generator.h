// Text generation on a tensor-parallel model with a key/value cache. A prompt runs in blocks of
// tokens (infer/prefill_form.h): the residual stream split by rows (AG+GEMM, GEMM+RS), or whole on
// every rank; after it one token at a time, every rank with the whole residual row (GEMM+AR).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "infer/prefill_form.h"
#include "infer/sampling.h"
#include "model/config.h"
#include "model/transformer.h"
#include "tandem/communicator.h"
#include "tandem/overlap.h"

namespace tandem {

struct GeneratorOptions {
  DType dtype = DType::f32;
  int64_t block = 32;  ///< tokens that prefill takes at once
  OverlapOptions overlap = {};
  CodecPolicy codec = {};  ///< of the sums over ranks; experts' stay plain
  PrefillForm prefill = PrefillForm::automatic;
};

class Generator {
 public:
  /// Collective over `tp`. The cache holds config.max_seq tokens.
  Generator(Communicator& tp, const ModelConfig& config, const GeneratorOptions& options = {});
  ~Generator();

  /// As in Transformer.
  std::span<float> parameters();
  const std::vector<Parameter>& parameter_list() const;
  void parameters_changed();

  int64_t capacity() const;
  /// Tokens in the cache.
  int64_t position() const;
  /// Forgets all tokens.
  void reset();
  /// Appends tokens (at least one) and returns the logits over the whole vocabulary after the last,
  /// the same bits on every rank; valid until the next call. Throws InvalidArgument for a token
  /// outside the vocabulary or more tokens than the cache has room for.
  std::span<const float> feed(std::span<const int32_t> tokens);

  /// Samples up to `count` tokens after `prompt`; on_token returns false to stop. When the cache is
  /// full, the later half of the text is fed again.
  void generate(std::span<const int32_t> prompt, int64_t count, const SamplingOptions& sampling,
                const std::function<bool(int32_t)>& on_token);
  /// The name of the form in which prompts run, as in prefill_form.h.
  const std::string& prefill() const;
  /// Seconds from the beginning of the last `generate` to the logits after its prompt.
  double prefill_s() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
