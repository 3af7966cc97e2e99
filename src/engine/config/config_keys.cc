#include <fmt/format.h>
#include <fmt/ranges.h>

#include "engine/config/config.h"

namespace tandem {
namespace {

constexpr double kBig = 1e15;

#define TANDEM_SLOT(member) [](TrainConfig& config) -> ConfigSlot { return &config.member; }

std::vector<ConfigKey> make_keys() {
  return {
      {"train.steps", TANDEM_SLOT(train.steps), 1, kBig, {}, "optimizer steps"},
      {"train.seconds",
       TANDEM_SLOT(train.seconds),
       0,
       kBig,
       {},
       "stop after this much time; the learning rate then follows it (0: after train.steps)"},
      {"train.tokens",
       TANDEM_SLOT(train.tokens),
       0,
       kBig,
       {},
       "stop after this many tokens; the learning rate then follows them (0: after "
       "train.steps)"},
      {"train.max_seconds",
       TANDEM_SLOT(train.max_seconds),
       0,
       kBig,
       {},
       "end the process after this much time, with a checkpoint, as Ctrl-C does (0: "
       "never)"},
      {"train.early_stop",
       TANDEM_SLOT(train.early_stop),
       0,
       kBig,
       {},
       "end the run after so many validation losses in a row that are not below the lowest "
       "one (0: never)"},
      {"train.skip_nonfinite",
       TANDEM_SLOT(train.skip_nonfinite),
       0,
       kBig,
       {},
       "drop so many steps whose loss or gradient norm is not finite, and end at the next "
       "one"},
      {"train.max_loss_spike",
       TANDEM_SLOT(train.max_loss_spike),
       0,
       kBig,
       {},
       "ratio of a loss to the running mean of those before, above which it is a spike (0: "
       "none is)"},
      {"train.skip_loss_spikes",
       TANDEM_SLOT(train.skip_loss_spikes),
       0,
       kBig,
       {},
       "drop so many steps whose loss is a spike, and end at the next one"},
      {"train.batch", TANDEM_SLOT(train.batch), 1, kBig, {}, "sequences per step, all ranks"},
      {"train.batch_start",
       TANDEM_SLOT(train.batch_start),
       0,
       kBig,
       {},
       "batch of the first step, which grows to train.batch (0: it does not grow)"},
      {"train.batch_increment",
       TANDEM_SLOT(train.batch_increment),
       0,
       kBig,
       {},
       "sequences that the batch grows by at once"},
      {"train.batch_rampup_samples",
       TANDEM_SLOT(train.batch_rampup_samples),
       0,
       kBig,
       {},
       "samples until the batch is train.batch"},
      {"train.microbatch",
       TANDEM_SLOT(train.microbatch),
       0,
       kBig,
       {},
       "sequences one rank processes at once; gradients accumulate (0: its whole share)"},
      {"train.seq", TANDEM_SLOT(train.seq), 1, kBig, {}, "tokens per sequence"},
      {"train.validate_every",
       TANDEM_SLOT(train.validate_every),
       0,
       kBig,
       {},
       "steps between losses on held-out data, as tandem eval takes them (0: none)"},
      {"train.validate_bytes",
       TANDEM_SLOT(train.validate_bytes),
       0,
       kBig,
       {},
       "of the held-out text that such a loss is taken on, or tokens, evenly spread over all of it "
       "(0: all); its time counts neither for train.seconds nor for tokens/s"},
      {"train.validate_steps",
       TANDEM_SLOT(train.validate_steps),
       0,
       kBig,
       {},
       "batches of train.batch sequences that such a loss is taken on instead (0: "
       "train.validate_bytes)"},
      {"train.aux_loss_scope",
       TANDEM_SLOT(train.aux_loss_scope),
       0,
       0,
       {"microbatch", "step"},
       "tokens of one load-balancing loss; step: a second forward pass if there are microbatches"},
      {"train.dtype",
       TANDEM_SLOT(train.dtype),
       0,
       0,
       {"auto", "f32", "bf16"},
       "of matrix products and activations; parameters stay f32 (auto: measured at the start, bf16 "
       "where it saves a fifth, and on GPUs; a resumed run keeps it)"},
      {"train.deterministic",
       TANDEM_SLOT(train.deterministic),
       0,
       0,
       {},
       "on GPUs: equal bits in every run; false is faster, most for long sequences"},
      {"train.recompute",
       TANDEM_SLOT(train.recompute),
       0,
       0,
       {"none", "selective", "full"},
       "activations that a layer computes again before its backward pass, not to store them: of "
       "norms, attention, SwiGLU and experts (selective), or of the whole layer"},
      {"train.recompute_layers",
       TANDEM_SLOT(train.recompute_layers),
       0,
       4096,
       {},
       "first layers of every pipeline stage that recompute (0: all)"},
      {"train.seed", TANDEM_SLOT(train.seed), 0, kBig, {}, "of weights and sample order"},
      {"model.vocab", TANDEM_SLOT(model.vocab), 257, 1 << 24, {}, "tokens (257: bytes and start)"},
      {"model.hidden", TANDEM_SLOT(model.hidden), 1, 1 << 20, {}, "width of the residual stream"},
      {"model.layers", TANDEM_SLOT(model.layers), 1, 4096, {}, "decoder layers"},
      {"model.heads", TANDEM_SLOT(model.heads), 1, 4096, {}, "query heads"},
      {"model.kv_heads", TANDEM_SLOT(model.kv_heads), 1, 4096, {}, "key and value heads"},
      {"model.head_dim", TANDEM_SLOT(model.head_dim), 2, 4096, {}, "features per head"},
      {"model.ffn", TANDEM_SLOT(model.ffn), 1, 1 << 22, {}, "width inside the MLP"},
      {"model.max_seq", TANDEM_SLOT(model.max_seq), 1, 1 << 24, {}, "longest sequence"},
      {"model.rope_theta", TANDEM_SLOT(model.rope_theta), 1, kBig, {}, "rotary base"},
      {"model.norm_eps", TANDEM_SLOT(model.norm_eps), kMinEpsilon, 1, {}, "RMSNorm epsilon"},
      {"model.tie_word_embeddings",
       TANDEM_SLOT(model.tie_word_embeddings),
       0,
       0,
       {},
       "head shares the embedding"},
      {"model.parallel_block",
       TANDEM_SLOT(model.parallel_block),
       0,
       0,
       {},
       "attention and MLP side by side (MegaScale)"},
      {"model.sliding_window",
       TANDEM_SLOT(model.sliding_window),
       0,
       1 << 24,
       {},
       "tokens that a query attends to, its own and those just before it (0: all)"},
      {"model.full_attention_freq",
       TANDEM_SLOT(model.full_attention_freq),
       0,
       4096,
       {},
       "of so many layers the last attends to all tokens (0: all layers have the window)"},
      {"model.experts",
       TANDEM_SLOT(model.experts),
       0,
       1 << 16,
       {},
       "experts of a layer (0: dense)"},
      {"model.top_k", TANDEM_SLOT(model.top_k), 1, 1 << 16, {}, "experts that a token goes to"},
      {"model.expert_ffn",
       TANDEM_SLOT(model.expert_ffn),
       0,
       1 << 22,
       {},
       "width inside an expert (0: model.ffn)"},
      {"model.shared_ffn",
       TANDEM_SLOT(model.shared_ffn),
       0,
       1 << 22,
       {},
       "width of an MLP that all tokens take in addition to experts (0: none)"},
      {"model.moe_layer_freq",
       TANDEM_SLOT(model.moe_layer_freq),
       1,
       4096,
       {},
       "of so many layers the last has experts, the others an MLP"},
      {"model.router",
       TANDEM_SLOT(model.router),
       0,
       0,
       {"softmax", "sigmoid"},
       "scores of the experts"},
      {"model.normalize_top_k",
       TANDEM_SLOT(model.normalize_top_k),
       0,
       0,
       {},
       "weights of a token's experts add up to model.route_scale"},
      {"model.route_scale", TANDEM_SLOT(model.route_scale), 1e-6, 1e6, {}, "factor of the weights"},
      {"model.aux_loss_coeff",
       TANDEM_SLOT(model.aux_loss_coeff),
       0,
       1e3,
       {},
       "coefficient of the load-balancing loss (train.aux_loss_scope)"},
      {"model.router_bias_update_rate",
       TANDEM_SLOT(model.router_bias_update_rate),
       0,
       1,
       {},
       "loss-free balancing: what a step moves the routers' biases by (0: none)"},
      {"optimizer.name",
       TANDEM_SLOT(optimizer.name),
       0,
       0,
       {"adamw", "lamb"},
       "lamb: AdamW's update of a tensor is scaled by the ratio of the norms of both"},
      {"optimizer.lr", TANDEM_SLOT(optimizer.lr), 0, 1e3, {}, "peak learning rate"},
      {"optimizer.min_lr",
       TANDEM_SLOT(optimizer.min_lr),
       0,
       1e3,
       {},
       "learning rate at the end of a schedule that decays"},
      {"optimizer.schedule",
       TANDEM_SLOT(optimizer.schedule),
       0,
       0,
       {"constant", "linear", "cosine", "wsd", "inverse-sqrt"},
       "learning rate after the warm-up"},
      {"optimizer.decay_fraction",
       TANDEM_SLOT(optimizer.decay_fraction),
       0.001,
       1,
       {},
       "last part of the run after the warm-up, in which wsd decays"},
      {"optimizer.decay_type",
       TANDEM_SLOT(optimizer.decay_type),
       0,
       0,
       {"linear", "cosine", "1-sqrt"},
       "how wsd decays"},
      {"optimizer.beta1", TANDEM_SLOT(optimizer.beta1), 0, 0.999999, {}, "first moment"},
      {"optimizer.beta2", TANDEM_SLOT(optimizer.beta2), 0, 0.999999, {}, "second moment"},
      {"optimizer.eps",
       TANDEM_SLOT(optimizer.eps),
       kMinEpsilon,
       1,
       {},
       "added to the root of the second moment"},
      {"optimizer.weight_decay",
       TANDEM_SLOT(optimizer.weight_decay),
       0,
       1e3,
       {},
       "decoupled, on matrices"},
      {"optimizer.warmup", TANDEM_SLOT(optimizer.warmup), 0, kBig, {}, "steps of linear warm-up"},
      {"optimizer.grad_clip",
       TANDEM_SLOT(optimizer.grad_clip),
       0,
       1e9,
       {},
       "largest global gradient norm (0: off)"},
      {"optimizer.no_decay",
       TANDEM_SLOT(optimizer.no_decay),
       0,
       0,
       {},
       "patterns of tensor names without weight decay, in addition to norms and routers' biases"},
      {"optimizer.lr_scale",
       TANDEM_SLOT(optimizer.lr_scale),
       0,
       0,
       {},
       "factors of the learning rate by pattern: {\"*embed_tokens*\" = 0.5}, or strings "
       "\"*embed_tokens*=0.5\""},
      {"parallel.tp", TANDEM_SLOT(parallel.tp), 1, 4096, {}, "tensor parallel ranks (--tp)"},
      {"parallel.dp", TANDEM_SLOT(parallel.dp), 1, 4096, {}, "data parallel ranks (--dp)"},
      {"parallel.ep",
       TANDEM_SLOT(parallel.ep),
       1,
       4096,
       {},
       "ranks that share the experts (--ep); divides parallel.dp"},
      {"parallel.zero",
       TANDEM_SLOT(parallel.zero),
       1,
       2,
       {},
       "divided among replicas: 1 optimizer state, 2 gradients, too"},
      {"parallel.pp", TANDEM_SLOT(parallel.pp), 1, 4096, {}, "pipeline parallel ranks (--pp)"},
      {"parallel.virtual_stages",
       TANDEM_SLOT(parallel.virtual_stages),
       1,
       64,
       {},
       "stages of a pipeline rank"},
      {"parallel.schedule",
       TANDEM_SLOT(parallel.schedule),
       0,
       0,
       {},
       "order of the pipeline's passes (docs/training.md)"},
      {"parallel.layers_per_stage",
       TANDEM_SLOT(parallel.layers_per_stage),
       0,
       4096,
       {},
       "layers of each stage, as [5, 6, 5] (empty: equal shares)"},
      {"parallel.dp_bucket_mib",
       TANDEM_SLOT(parallel.dp_bucket_mib),
       0,
       1e6,
       {},
       "MiB of gradients that leave together (0: 4, on GPUs 100)"},
      {"parallel.strategy",
       TANDEM_SLOT(parallel.strategy),
       0,
       0,
       {"automatic", "serial", "overlapped"},
       "of the overlap operators"},
      {"parallel.chunks",
       TANDEM_SLOT(parallel.chunks),
       0,
       4096,
       {},
       "transfers per shard when overlapped (0: chosen)"},
      {"parallel.link",
       TANDEM_SLOT(parallel.link),
       0,
       0,
       {},
       "emulated link between ranks that are threads, \"1GB/s,20us\""},
      {"parallel.codec",
       TANDEM_SLOT(parallel.codec),
       0,
       0,
       {},
       "what the forward pass's sums over tensor-parallel ranks travel as (--codec): \"int8\", "
       "\"mlp=int4:g32,attention=int8\"; also experts' rows and sums, embeddings' rows, "
       "gradients and weights between data-parallel ranks, and rows between pipeline stages: "
       "\"gradients=int4:g32,weights=lossless,stages=int8\"; or a table of these"},
      {"parallel.error_feedback",
       TANDEM_SLOT(parallel.error_feedback),
       0,
       0,
       {},
       "what encoding a gradient loses is added to the next step's"},
      {"data.paths",
       TANDEM_SLOT(data.paths),
       0,
       0,
       {},
       "folders, globs and files, or a blend: [\"0.7 PATH\", \"0.3 PATH\"]"},
      {"data.format",
       TANDEM_SLOT(data.format),
       0,
       0,
       {"auto", "text", "jsonl", "tokens"},
       "of the files (auto: tokens where all end in .bin, .idx or .npy, jsonl where all end in "
       ".jsonl or .ndjson, else text)"},
      {"data.val_fraction",
       TANDEM_SLOT(data.val_fraction),
       0,
       0.9,
       {},
       "share kept out of training: files of text and documents of JSON Lines by a hash of their "
       "content, the last documents or tokens of token files"},
      {"data.val_paths",
       TANDEM_SLOT(data.val_paths),
       0,
       0,
       {},
       "data to validate on instead, as data.paths"},
      {"data.manifest",
       TANDEM_SLOT(data.manifest),
       0,
       0,
       {},
       "what `tandem data index` wrote of the files (\"\": in a resumed run OUT/data.json)"},
      {"checkpoint.every",
       TANDEM_SLOT(checkpoint.every),
       0,
       kBig,
       {},
       "steps between checkpoints (0: only when the run ends or is stopped)"},
      {"checkpoint.every_s",
       TANDEM_SLOT(checkpoint.every_s),
       0,
       kBig,
       {},
       "seconds of training between checkpoints, also (0: none)"},
      {"checkpoint.first_step",
       TANDEM_SLOT(checkpoint.first_step),
       0,
       0,
       {},
       "a checkpoint after step 1, too, which shows early that saving works"},
      {"checkpoint.keep", TANDEM_SLOT(checkpoint.keep), 1, kBig, {}, "newest checkpoints kept"},
      {"checkpoint.export_dtype",
       TANDEM_SLOT(checkpoint.export_dtype),
       0,
       0,
       {"f32", "bf16"},
       "dtype of the weights in final/"},
      {"trace.enabled", TANDEM_SLOT(trace.enabled), 0, 0, {}, "write trace.json"},
      {"trace.steps",
       TANDEM_SLOT(trace.steps),
       1,
       1000,
       {},
       "steps in the trace: of some runs of so many, a typical one"},
  };
}
#undef TANDEM_SLOT

struct Describe {
  const ConfigKey& key;
  std::string operator()(int64_t* value) const {
    return fmt::format("integer {}, {:.10g} to {:.10g}", *value, key.min, key.max);
  }
  std::string operator()(double* value) const {
    return fmt::format("number {:g}, {:.7g} to {:.7g}", *value, key.min, key.max);
  }
  std::string operator()(bool* value) const { return fmt::format("boolean {}", *value); }
  std::string operator()(std::string* value) const {
    return key.choices.empty()
               ? fmt::format("string \"{}\"", *value)
               : fmt::format("string \"{}\", of {}", *value, fmt::join(key.choices, ", "));
  }
  std::string operator()(std::vector<std::string>* value) const {
    return fmt::format("strings [{}]", fmt::join(*value, ", "));
  }
  std::string operator()(std::vector<int64_t>* value) const {
    return fmt::format("integers [{}], {:.10g} to {:.10g}", fmt::join(*value, ", "), key.min,
                       key.max);
  }
};

struct AsToml {
  std::string operator()(const int64_t* value) const { return fmt::format("{}", *value); }
  std::string operator()(const double* value) const { return fmt::format("{}", *value); }
  std::string operator()(const bool* value) const { return fmt::format("{}", *value); }
  std::string operator()(const std::string* value) const { return fmt::format("\"{}\"", *value); }
  std::string operator()(const std::vector<std::string>* value) const {
    return value->empty() ? "[]" : fmt::format("[\"{}\"]", fmt::join(*value, "\", \""));
  }
  std::string operator()(const std::vector<int64_t>* value) const {
    return fmt::format("[{}]", fmt::join(*value, ", "));
  }
};

}  // namespace

std::span<const ConfigKey> config_keys() {
  static const std::vector<ConfigKey> keys = make_keys();
  return keys;
}

std::span<const RenamedKey> renamed_keys() {
  static constexpr RenamedKey kRenamed[] = {
      {"model.tied_head", "model.tie_word_embeddings"},
      {"model.moe_every", "model.moe_layer_freq"},
      {"model.aux_loss", "model.aux_loss_coeff"},
      {"model.bias_rate", "model.router_bias_update_rate"},
      {"optimizer.clip", "optimizer.grad_clip"},
      {"parallel.bucket_mb", "parallel.dp_bucket_mib"},
      {"data.heldout", "data.val_fraction"},
  };
  return kRenamed;
}

std::string_view current_name(std::string_view old) {
  for (const RenamedKey& key : renamed_keys()) {
    if (key.old == old) return key.name;
  }
  return {};
}

std::string describe_config_keys() {
  TrainConfig defaults;
  std::string text;
  for (const ConfigKey& key : config_keys()) {
    text += fmt::format("{:<30} {} ({})\n", key.name, key.help,
                        std::visit(Describe{key}, key.slot(defaults)));
  }
  return text;
}

std::vector<KeyDifference> differing_keys(const TrainConfig& before, const TrainConfig& after) {
  TrainConfig copies[] = {before, after};
  std::vector<KeyDifference> differences;
  for (const ConfigKey& key : config_keys()) {
    const std::string was = std::visit(AsToml(), key.slot(copies[0]));
    const std::string is = std::visit(AsToml(), key.slot(copies[1]));
    if (was != is) differences.push_back({key.name, was, is});
  }
  return differences;
}

}  // namespace tandem
