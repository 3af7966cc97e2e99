#include "engine/infer/rank_model.h"

#include <fmt/format.h>

#include "comm/exec.h"
#include "core/system/machine.h"
#include "engine/config/device_traits.h"
#include "engine/model/program/cost.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Throws InvalidArgument if a cache of all CPU ranks does not fit into memory.
const KvCache::Size& checked_size(const Exec& exec, const ModelConfig& config, DType dtype,
                                  const KvCache::Size& size) {
  if (size.max_tokens < 1 || size.max_tokens > config.max_seq) {
    throw InvalidArgument(
        fmt::format("capacity {}: expected 1 to max_seq = {}", size.max_tokens, config.max_seq));
  }
  if (!device_traits(exec).is_host) return size;  // its allocation says what it lacks
  const double tokens = double(size.pages) * double(kPageTokens);
  const double bytes = 2.0 * tokens * double(config.head_dim) *
                       double(config.layers * config.kv_heads + 1) * double(size_of(dtype));
  const auto machine = double(this_machine().memory_bytes);
  if (machine == 0 || bytes <= machine) return size;
  throw InvalidArgument(fmt::format(
      "keys and values of {} tokens need {:.3g} GB: expected at most this machine's {:.3g} GB",
      tokens, bytes / 1e9, machine / 1e9));
}

Weights make_weights(const Exec& exec, const ModelLayout& layout, DType dtype, bool is_int8) {
  if (!is_int8) return Weights(exec, layout, dtype, false);
  return Weights::make_first(exec, layout, dtype, layout.embedding.rows * layout.embedding.columns);
}

}  // namespace

RankModel::RankModel(Communicator& tp, const ModelConfig& model, DType dtype,
                     const KvCache::Size& size, const CodecPolicy& codec, bool is_int8)
    : config(model),
      layout(config, tp.size(), tp.rank()),
      exec(make_exec(tp)),
      weights(make_weights(exec, layout, dtype, is_int8)),
      rope(exec, checked_size(exec, config, dtype, size).max_tokens, config),
      cache(exec, config, layout, rope, dtype, size),
      context{tp, config, layout, weights, dtype, cache, codec, exec, is_int8 ? &int8 : nullptr} {}

void RankModel::set_weights(const SetParameter& set) {
  for (const Parameter& p : layout.parameters) set(p, weights.views(local_range(p)));
  if (context.int8) int8.set(layout, set);
}

void check_gpu_generation(const ModelConfig& config, int tp, DType dtype) {
  program::check_gpu_operations(config);
  if (config.experts > 0 && dtype != DType::bf16) {
    throw Unsupported(
        fmt::format("{} experts in {}: expected bf16 on GPUs", config.experts, name_of(dtype)));
  }
  const auto check = [](const char* key, int64_t value, int64_t unit) {
    if (value % unit == 0) return;
    throw Unsupported(fmt::format("{} = {}: expected a multiple of {} on GPUs", key, value, unit));
  };
  check("vocab_size", config.vocab, 8 * tp);
  check("hidden_size", config.hidden, 8);
  check("intermediate_size", config.ffn, 8 * tp);
  if (config.experts > 0) check("moe_intermediate_size", config.ffn_per_expert(), 8 * tp);
  check("head_dim", config.head_dim, 16);
}

void check_tokens(const ModelConfig& config, std::span<const int32_t> tokens) {
  if (tokens.empty()) throw InvalidArgument("tokens: expected at least one");
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0 && tokens[i] < config.vocab) continue;
    throw InvalidArgument(fmt::format("tokens: {} at position {}: expected 0 to {} (vocab {})",
                                      tokens[i], i, config.vocab - 1, config.vocab));
  }
}

}  // namespace tandem
