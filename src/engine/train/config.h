// Tables `train` (length of the run, batches, validation, dtype, recomputation), `trace` and
// `check` (corrupt data in memory).
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "tandem/dtype.h"

namespace tandem {

template <class S>
struct Key;  // engine/config/section.h

struct RunConfig {
  int64_t steps = 1000;
  double seconds = 0;
  int64_t tokens = 0;
  double max_seconds = 0;
  int64_t early_stop = 0;
  int64_t skip_nonfinite = 0;
  double max_loss_spike = 0;  ///< ratio
  int64_t skip_loss_spikes = 0;
  int64_t batch = 16;
  int64_t batch_start = 0;  ///< 0: the batch does not grow
  int64_t batch_increment = 0;
  int64_t batch_rampup_samples = 0;
  int64_t microbatch = 0;
  int64_t seq = 128;
  int64_t validate_every = 0;
  int64_t validate_bytes = 1 << 18;
  int64_t validate_steps = 0;
  std::string dtype = "auto";
  std::string gradient_dtype = "f32";
  std::string residual_gradient = "f32";  ///< dtype
  int64_t head_rows = 0;                  ///< 0: all
  bool fp8_weight_gradients = true;
  bool fp8_scales = true;
  bool save_best = false;
  std::string aux_loss_scope = "microbatch";
  int64_t seed = 1;
  std::string init;  ///< folder of the model that the weights are of at first; empty: random ones
  bool deterministic = true;
  std::string recompute = "none";   ///< a Recompute
  int64_t recompute_layers = 0;     ///< 0: all
  std::string moe_save = "sorted";  ///< a MoeSave

  /// Sequences of the step whose first sample is `sample`. In a ramp-up the batch grows in equal
  /// increments from batch_start to batch over the first batch_rampup_samples samples, as with
  /// --rampup-batch-size of Megatron-LM: a function of the samples consumed, it resumes with them.
  int64_t batch_at(int64_t sample) const;
  /// `dtype` of activations and of what is not quantized; "auto" as f32.
  DType activation_dtype() const { return dtype == "bf16" || is_fp8() ? DType::bf16 : DType::f32; }
  bool is_fp8() const { return dtype == "fp8"; }
  /// Whether `steps` is the run's length: neither seconds nor tokens is set.
  bool ends_by_steps() const { return seconds == 0 && tokens == 0; }

  static std::span<const Key<RunConfig>> keys();
  /// Throws ConfigError if keys contradict each other or have no effect.
  void check() const;
};

struct TraceConfig {
  bool enabled = false;
  int64_t steps = 2;
  bool ranks = true;
  int64_t stream_mib = 0;

  static std::span<const Key<TraceConfig>> keys();
};

struct IntegrityConfig {
  std::string action = "off";
  double weights = 1;  ///< this and the next two: shares
  double state = 0.1;
  double recompute = 0;

  static std::span<const Key<IntegrityConfig>> keys();
};

}  // namespace tandem
