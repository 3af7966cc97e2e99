#include "engine/infer/rank_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <string>

#include "comm/device/gpu_coordinates.h"
#include "comm/exec.h"
#include "core/system/env.h"
#include "core/system/machine.h"
#include "engine/config/device_traits.h"
#include "engine/model/program/cost.h"
#include "tandem/error.h"

namespace tandem {
namespace {

void check_capacity(const ModelConfig& config, const KvCache::Size& size) {
  if (size.max_tokens >= 1 && size.max_tokens <= config.max_seq) return;
  throw InvalidArgument(
      fmt::format("capacity {}: expected 1 to max_seq = {}", size.max_tokens, config.max_seq));
}

/// Bytes of a rank's weights and cache, and those that its host's processes may have.
struct RankBytes {
  double weights = 0, cache = 0, host = 0;
};

/// Bytes of `weights` of a model or a rank, of which `embedding` are the embedding's.
double stored_bytes(const ModelConfig& config, double weights, double embedding, DType dtype,
                    std::optional<WeightFormat> format) {
  const auto element = double(size_of(dtype));
  if (!format) return weights * element;
  const double coded = weights - (config.tie_word_embeddings ? 0 : embedding);
  return embedding * element + coded * bytes_per_weight(*format);
}

RankBytes rank_bytes(const ModelConfig& config, const ModelLayout& layout, DType dtype,
                     const KvCache::Size& size, std::optional<WeightFormat> format) {
  RankBytes bytes{.host = double(usable_memory_bytes())};
  bytes.weights =
      stored_bytes(config, double(layout.size),
                   double(layout.embedding.rows * layout.embedding.columns), dtype, format);
  bytes.cache = KvCache::bytes(layout, dtype, size) + RopeTables::bytes(size.max_tokens, config);
  return bytes;
}

/// Refuses weights and a cache that do not fit into a host's memory, on all ranks, before any of it
/// is allocated. Collective.
void check_memory(Communicator& tp, const RankBytes& local, const KvCache::Size& size) {
  const std::string blob =
      std::string(reinterpret_cast<const char*>(&local), sizeof local) + this_node();
  std::map<std::string, RankBytes> hosts;
  for (const auto& each : tp.exchange(std::as_bytes(std::span(blob)), "memory of the model")) {
    RankBytes of_rank;
    std::memcpy(&of_rank, each.data(), sizeof of_rank);
    const auto* const name = reinterpret_cast<const char*>(each.data()) + sizeof of_rank;
    RankBytes& sum = hosts[std::string(name, each.size() - sizeof of_rank)];
    sum = {sum.weights + of_rank.weights, sum.cache + of_rank.cache,
           std::max(sum.host, of_rank.host)};
  }
  for (const auto& [host, sum] : hosts) {
    if (sum.host == 0 || sum.weights + sum.cache <= sum.host) continue;
    throw InvalidArgument(fmt::format(
        "weights of {:.3g} GB, and keys and values of {} tokens of {:.3g} GB: expected at most the "
        "{:.3g} GB of a machine's memory",
        sum.weights / 1e9, double(size.pages) * double(kPageTokens), sum.cache / 1e9,
        sum.host / 1e9));
  }
}

/// Exec of a rank whose model fits into memory. On a GPU an allocation says what it lacks.
Exec checked_exec(Communicator& tp, const ModelConfig& config, const ModelLayout& layout,
                  DType dtype, const KvCache::Size& size, std::optional<WeightFormat> format) {
  const Exec exec = make_exec(tp);
  check_capacity(config, size);
  if (device_traits(exec).is_host) {
    check_memory(tp, rank_bytes(config, layout, dtype, size, format), size);
  }
  return exec;
}

Weights make_weights(const Exec& exec, const ModelLayout& layout, DType dtype, bool is_coded) {
  if (!is_coded) return Weights(exec, layout, dtype, false);
  return Weights::make_first(exec, layout, dtype, layout.embedding.rows * layout.embedding.columns);
}

std::unique_ptr<CodedWeights> make_coded(const Exec& exec, const ModelLayout& layout,
                                         std::optional<WeightFormat> format,
                                         const KvCache::Size& size) {
  if (!format) return nullptr;
  const int64_t singles = size.singles > 0 ? size.singles : size.rows;
  return std::make_unique<CodedWeights>(exec, layout, *format, singles);
}

}  // namespace

RankModel::RankModel(Communicator& tp, const ModelConfig& model, DType dtype,
                     const KvCache::Size& size, const CodecPolicy& codec,
                     std::optional<WeightFormat> format)
    : config(model),
      layout(config, tp.size(), tp.rank()),
      exec(checked_exec(tp, config, layout, dtype, size, format)),
      weights(make_weights(exec, layout, dtype, format.has_value())),
      coded(make_coded(exec, layout, format, size)),
      rope(exec, size.max_tokens, config),
      cache(exec, config, layout, rope, dtype, size),
      context{tp, config, layout, weights, dtype, cache, codec, exec, coded ? &*coded : nullptr} {}

void RankModel::set_weights(const SetParameter& set) {
  for (const Parameter& p : layout.parameters) set(p, weights.views(local_range(p)));
  if (coded) coded->set(layout, set);
}

void check_gpu_generation(const ModelConfig& config, int tp, DType dtype,
                          std::optional<WeightFormat> format) {
  program::check_gpu_operations(config);
  if (format && config.experts > 0) {
    throw Unsupported(
        fmt::format("weights in {} with experts on GPUs: expected a dense model, or CPU ranks",
                    name_of(*format)));
  }
  if (format && env().gpu_portable) {
    throw Unsupported(fmt::format(
        "weights in {} with TANDEM_GPU_PORTABLE=1 on GPUs: expected it unset, or CPU ranks",
        name_of(*format)));
  }
  if (format && dtype != DType::bf16) {
    throw Unsupported(fmt::format("weights in {} with {} on GPUs: expected bf16", name_of(*format),
                                  name_of(dtype)));
  }
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

double weight_bytes(const ModelConfig& config, DType dtype, std::optional<WeightFormat> format) {
  return stored_bytes(config, double(config.parameters()),
                      double(config.vocab) * double(config.hidden), dtype, format);
}

double gpu_weight_bytes(const ModelConfig& config, int tp, DType dtype,
                        std::optional<WeightFormat> format) {
  double bytes = weight_bytes(config, dtype, format);
  if (format) {  // a rounded matrix (CodedWeights), and one in f32 that is loaded
    const double largest = double(std::max(config.vocab, 2 * config.ffn)) * double(config.hidden);
    bytes += largest * (sizeof(BFloat16) + sizeof(float));
  }
  return bytes / tp;
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
