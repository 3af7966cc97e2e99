#include "engine/model/pretrained.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/files.h"
#include "core/host_copy.h"
#include "core/printable.h"
#include "engine/model/layout.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Rotary embedding frequencies in files from before 2023, redundant with rope_theta.
constexpr std::string_view kFrequencies = ".self_attn.rotary_emb.inv_freq";

bool same_bytes(const SafetensorsFile& file, const SafetensorsEntry& a, const SafetensorsEntry& b) {
  return a.dtype == b.dtype && a.shape == b.shape && file.hash(a) == file.hash(b);
}

/// Whether an unread tensor has no effect on the model.
bool is_redundant(const ModelConfig& config, const SafetensorsFile& file,
                  const SafetensorsEntry& entry) {
  if (entry.name.ends_with(kFrequencies)) return true;
  const SafetensorsEntry* embedding = file.find("model.embed_tokens.weight");
  return config.tie_word_embeddings && entry.name == "lm_head.weight" && embedding &&
         same_bytes(file, entry, *embedding);
}

/// Checked before tensor names are generated: config.json may contain any number.
void require_at_most(const SafetensorsFile& weights, const char* key, int64_t value) {
  const auto tensors = int64_t(weights.entries().size());
  if (value <= tensors) return;
  throw IoError(fmt::format("{}: {} tensors: expected more, for {} = {} in config.json",
                            weights.path(), tensors, key, value));
}

/// `values`: the parameter's local_range.
void read_shard(const SafetensorsFile& file, const SafetensorsEntry& entry, const LocalShard& shard,
                std::span<float> values) {
  if (shard.columns == shard.whole_columns && shard.row_stride == shard.columns) {  // contiguous
    return file.read_f32(entry, shard.first, values);
  }
  for (int64_t row = 0; row < shard.rows && shard.columns > 0; ++row) {
    file.read_f32(entry, shard.first + row * shard.whole_columns,
                  values.subspan(size_t(row * shard.row_stride), size_t(shard.columns)));
  }
}

/// Non-finite element of a rank's shard of a parameter.
struct BadElement {
  int64_t element;  ///< index in the full tensor
  float value;
};

/// `values`: the parameter's local_range.
std::optional<BadElement> find_not_finite(const LocalShard& shard, std::span<const float> values) {
  for (int64_t row = 0; row < shard.rows && shard.columns > 0; ++row) {
    const auto local = values.subspan(size_t(row * shard.row_stride), size_t(shard.columns));
    if (const auto bad = first_not_finite(local)) {
      return BadElement{shard.first + row * shard.whole_columns + int64_t(*bad), local[*bad]};
    }
  }
  return std::nullopt;
}

}  // namespace

std::string model_identity(const ModelConfig& config, const SafetensorsFile& weights) {
  return fmt::format("config {}, weights {}", content_hash(to_json(config)), weights.identity());
}

void require_same_tensors(const ModelConfig& config, const SafetensorsFile& weights) {
  require_at_most(weights, "num_hidden_layers", config.layers);
  require_at_most(weights, "num_local_experts x layers of experts",
                  config.experts * config.moe_layers());
  std::vector<std::string> known;
  for (const Parameter& p : ModelLayout(config, 1, 0).parameters) {
    weights.require(p.name, p.shape);
    known.push_back(p.name);
  }
  std::ranges::sort(known);
  const SafetensorsEntry* first = nullptr;
  size_t count = 0;
  for (const SafetensorsEntry& entry : weights.entries()) {
    if (std::ranges::binary_search(known, entry.name) || is_redundant(config, weights, entry))
      continue;
    if (count++ == 0) first = &entry;
  }
  if (count == 0) return;
  throw IoError(fmt::format(
      "{}: tensor '{}' is not read by the model of config.json (1 of {} such, of {}): expected no "
      "others than its {}",
      weights.path(), printable(first->name), count, weights.entries().size(), known.size()));
}

std::optional<size_t> first_not_finite(std::span<const float> values) {
  // Fast check of all: 0 * x is 0 for every finite x.
  float sum = 0;
  for (const float value : values) sum += 0 * value;
  if (sum == 0) return std::nullopt;
  const auto bad = std::ranges::find_if_not(values, [](float x) { return std::isfinite(x); });
  return size_t(bad - values.begin());
}

void load_parameters(const SafetensorsFile& file, const std::vector<Parameter>& parameters,
                     const Exec& exec, const Tensor& values) {
  for (const Parameter& p : parameters) {
    const SafetensorsEntry& entry = file.require(p.name, p.shape);
    const LocalShard shard = local_shard(p);
    const FlatRange range = local_range(p);
    const HostCopy local(exec, values.narrow(0, range.begin, range.count));
    read_shard(file, entry, shard, local.values());
    if (const auto bad = find_not_finite(shard, local.values())) {
      throw IoError(fmt::format("{}: tensor '{}': element {} is {}: expected finite numbers",
                                file.path(), p.name, bad->element, bad->value));
    }
    local.store();
  }
}

}  // namespace tandem
