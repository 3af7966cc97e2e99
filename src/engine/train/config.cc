#include "engine/train/config.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/config/section.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr Key<RunConfig> kRunKeys[] = {
    {"steps", &RunConfig::steps, Range(1, kBig), "optimizer steps"},
    {"seconds", &RunConfig::seconds, Range(0, kBig),
     "stop after this much time; the learning rate then follows it (0: after train.steps)"},
    {"tokens", &RunConfig::tokens, Range(0, kBig),
     "stop after this many tokens; the learning rate then follows them (0: after train.steps)"},
    {"max_seconds", &RunConfig::max_seconds, Range(0, kBig),
     "end the process after this much time, with a checkpoint, as Ctrl-C does (0: never)"},
    {"early_stop", &RunConfig::early_stop, Range(0, kBig),
     "end the run after so many validation losses in a row that are not below the lowest one (0: "
     "never)"},
    {"skip_nonfinite", &RunConfig::skip_nonfinite, Range(0, kBig),
     "drop so many steps whose loss or gradient norm is not finite, and end at the next one"},
    {"max_loss_spike", &RunConfig::max_loss_spike, Range(0, kBig),
     "ratio of a loss to the running mean of those before, above which it is a spike (0: none is)"},
    {"skip_loss_spikes", &RunConfig::skip_loss_spikes, Range(0, kBig),
     "drop so many steps whose loss is a spike, and end at the next one"},
    {"batch", &RunConfig::batch, Range(1, kBig), "sequences per step, all ranks"},
    {"batch_start", &RunConfig::batch_start, Range(0, kBig),
     "batch of the first step, which grows to train.batch (0: it does not grow)"},
    {"batch_increment", &RunConfig::batch_increment, Range(0, kBig),
     "sequences that the batch grows by at once"},
    {"batch_rampup_samples", &RunConfig::batch_rampup_samples, Range(0, kBig),
     "samples until the batch is train.batch"},
    {"microbatch", &RunConfig::microbatch, Range(0, kBig),
     "sequences one rank processes at once; gradients accumulate (0: its whole share)"},
    {"seq", &RunConfig::seq, Range(1, kBig), "tokens per sequence"},
    {"validate_every", &RunConfig::validate_every, Range(0, kBig),
     "steps between losses on held-out data, as tandem eval takes them (0: none)"},
    {"validate_bytes", &RunConfig::validate_bytes, Range(0, kBig),
     "of the held-out text that such a loss is taken on, or tokens, evenly spread over all of it "
     "(0: all); its time counts neither for train.seconds nor for tokens/s"},
    {"validate_steps", &RunConfig::validate_steps, Range(0, kBig),
     "batches of train.batch sequences that such a loss is taken on instead (0: "
     "train.validate_bytes)"},
    {"save_best", &RunConfig::save_best, kAny,
     "final/ has the weights of the lowest validation loss, and is written after each validation "
     "that lowers it, not at the end"},
    {"aux_loss_scope", &RunConfig::aux_loss_scope, one_of("microbatch", "step"),
     "tokens of one load-balancing loss; step: a second forward pass if there are microbatches"},
    {"dtype", &RunConfig::dtype, one_of("auto", "f32", "bf16", "fp8"),
     "of matrix products and activations; owners of the optimizer state keep f32 weights (auto: "
     "measured at the start, bf16 where it saves a fifth, and on GPUs; a resumed run keeps it; "
     "fp8: bf16, but products of dense layers, and on CPU ranks of experts, multiply e4m3 rows)"},
    {"gradient_dtype", &RunConfig::gradient_dtype, one_of("f32", "bf16"),
     "of the weights' gradients, with train.dtype bf16 or fp8; bf16: half their memory and "
     "traffic, for one microbatch a step, as sums of several would be rounded each time"},
    {"residual_gradient", &RunConfig::residual_gradient, one_of("f32", "bf16"),
     "dtype of the residual stream's gradient, with train.dtype bf16 or fp8; bf16: less traffic, "
     "the sum is rounded after each attention and each MLP"},
    {"head_rows", &RunConfig::head_rows, Range(0, kBig),
     "rows of a microbatch, of all tensor-parallel ranks, whose logits the head computes at once, "
     "with their loss and gradients; memory of logits is that of so many rows (0: all)"},
    {"fp8_weight_gradients", &RunConfig::fp8_weight_gradients, kAny,
     "where train.dtype is fp8 and parallel.tp 1: products of weight gradients are fp8, too; false "
     "keeps them in bf16"},
    {"fp8_scales", &RunConfig::fp8_scales, kAny,
     "where train.dtype is fp8: e4m3 rows have scales; false: they are rounded without, as a "
     "control, on CPU ranks"},
    {"deterministic", &RunConfig::deterministic, kAny,
     "on GPUs: equal bits in every run; false is faster, most for long sequences"},
    {"recompute", &RunConfig::recompute, one_of("none", "selective", "full"),
     "activations that a layer computes again before its backward pass, not to store them: of "
     "norms, attention, SwiGLU and experts (selective), or of the whole layer"},
    {"recompute_layers", &RunConfig::recompute_layers, Range(0, 4096),
     "first layers of every pipeline stage that recompute (0: all)"},
    {"moe_save", &RunConfig::moe_save, one_of("sorted", "rows", "recompute"),
     "rows of experts saved for the backward pass, on CPU ranks: sorted, once for every local "
     "expert; rows, once each, sorted again; recompute: only those of a rank's tokens, sent and "
     "multiplied again"},
    {"seed", &RunConfig::seed, Range(0, kBig), "of weights and sample order"},
    {"init", &RunConfig::init, kAny, "folder of a model to start from (--init)"},
};

constexpr Key<TraceConfig> kTraceKeys[] = {
    {"enabled", &TraceConfig::enabled, kAny, "write trace.json"},
    {"steps", &TraceConfig::steps, Range(1, 1000),
     "steps in the trace: of some runs of so many, a typical one"},
    {"ranks", &TraceConfig::ranks, kAny,
     "record every rank's phases in ranks/, and compare the first steps with a prediction"},
    {"stream_mib", &TraceConfig::stream_mib, Range(0, 1 << 20),
     "record all steps in trace/: MiB a rank, of the newest ones (0: none)"},
};

constexpr Key<IntegrityConfig> kIntegrityKeys[] = {
    {"action", &IntegrityConfig::action, one_of("off", "warn", "stop", "replace"),
     "if data in memory turn out to be corrupt: name the rank (warn), and end the run without "
     "saving them (stop) or have tandem launch --spares replace the rank (replace); off: no check"},
    {"weights", &IntegrityConfig::weights, Range(0, 1),
     "share of the weights that several ranks hold, compared in each step"},
    {"state", &IntegrityConfig::state, Range(0, 1),
     "share of the optimizer's state whose hash is compared from one update to the next"},
    {"recompute", &IntegrityConfig::recompute, Range(0, 1),
     "share of the steps whose gradients are computed twice and compared"},
};

void check_batch_rampup(const RunConfig& train) {
  if (train.batch_start == 0) {
    if (train.batch_increment == 0 && train.batch_rampup_samples == 0) return;
    throw ConfigError(
        "train.batch_start is 0, no ramp-up: expected train.batch_increment and "
        "train.batch_rampup_samples to be 0");
  }
  if (train.batch_start >= train.batch) {
    throw ConfigError(fmt::format("train.batch_start is {}: expected less than train.batch = {}",
                                  train.batch_start, train.batch));
  }
  if (train.batch_rampup_samples == 0) {
    throw ConfigError(
        "train.batch_rampup_samples is 0: expected the samples over which the batch grows");
  }
  if (train.microbatch == 0) {
    throw ConfigError(
        "train.microbatch is 0: expected its size, which stays the same while the batch grows");
  }
  if (train.batch_increment == 0 ||
      (train.batch - train.batch_start) % train.batch_increment != 0) {
    throw ConfigError(fmt::format(
        "train.batch_increment is {}: expected a divisor of train.batch - train.batch_start = {}",
        train.batch_increment, train.batch - train.batch_start));
  }
}

}  // namespace

std::span<const Key<RunConfig>> RunConfig::keys() {
  return kRunKeys;
}

std::span<const Key<TraceConfig>> TraceConfig::keys() {
  return kTraceKeys;
}

std::span<const Key<IntegrityConfig>> IntegrityConfig::keys() {
  return kIntegrityKeys;
}

int64_t RunConfig::batch_at(int64_t sample) const {
  if (batch_start == 0 || sample >= batch_rampup_samples) return batch;
  const int64_t increments = (batch - batch_start) / batch_increment;
  const double done = double(sample) * double(increments) / double(batch_rampup_samples);
  return batch_start + std::min(int64_t(done), increments) * batch_increment;
}

void RunConfig::check() const {
  check_batch_rampup(*this);
  if (tokens > 0 && seconds > 0) {
    throw ConfigError(fmt::format(
        "train.tokens is {} and train.seconds is {}: expected one of them", tokens, seconds));
  }
  if (early_stop > 0 && validate_every == 0) {
    throw ConfigError(
        fmt::format("train.early_stop is {}: expected train.validate_every above 0, the steps "
                    "between the losses that it compares",
                    early_stop));
  }
  if (save_best && validate_every == 0) {
    throw ConfigError(
        "train.save_best is true: expected train.validate_every above 0, the steps between "
        "the losses that it compares");
  }
  for (const auto& [key, is_on] : {std::pair("fp8_weight_gradients", fp8_weight_gradients),
                                   std::pair("fp8_scales", fp8_scales)}) {
    if (is_on || is_fp8()) continue;
    throw ConfigError(fmt::format(
        "train.{} is false with train.dtype = \"{}\": expected true, as it has no effect", key,
        dtype));
  }
  if (max_loss_spike > 0 && max_loss_spike <= 1) {
    throw ConfigError(
        fmt::format("train.max_loss_spike is {}: expected 0, or a ratio above 1 of a loss to the "
                    "mean of those before",
                    max_loss_spike));
  }
  if (skip_loss_spikes > 0 && max_loss_spike == 0) {
    throw ConfigError(
        fmt::format("train.skip_loss_spikes is {}: expected train.max_loss_spike, the ratio from "
                    "which a loss is one",
                    skip_loss_spikes));
  }
}

}  // namespace tandem
