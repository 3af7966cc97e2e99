#include "engine/model/pretrained.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/host_copy.h"
#include "core/system/files.h"
#include "core/system/printable.h"
#include "engine/model/layout.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Rotary embedding frequencies in files from before 2023, redundant with rope_theta.
constexpr std::string_view kFrequencies = ".self_attn.rotary_emb.inv_freq";

bool same_bytes(const StoredTensor& a, const StoredTensor& b) {
  return a.entry->dtype == b.entry->dtype && a.entry->shape == b.entry->shape &&
         a.file->hash(*a.entry) == b.file->hash(*b.entry);
}

/// Scales with which other programs quantize activations.
constexpr std::string_view kActivationScales[] = {".input_scale", ".input_scale_ub"};

/// Whether an unread tensor has no effect on the model.
bool is_redundant(const ModelConfig& config, const WeightFiles& weights,
                  const StoredTensor& tensor) {
  if (tensor.entry->name.ends_with(kFrequencies)) return true;
  if (!weights.quantization().method.empty() &&
      std::ranges::any_of(kActivationScales, [&](std::string_view suffix) {
        return tensor.entry->name.ends_with(suffix);
      })) {
    return true;
  }
  const StoredTensor embedding = weights.find("model.embed_tokens.weight");
  return config.tie_word_embeddings && tensor.entry->name == "lm_head.weight" && embedding &&
         same_bytes(tensor, embedding);
}

/// Checked before tensor names are generated: config.json may contain any number.
void require_at_most(const WeightFiles& weights, const char* key, int64_t value) {
  const auto tensors = int64_t(weights.tensors().size());
  if (value <= tensors) return;
  throw IoError(fmt::format("{}: {} tensors: expected more, for {} = {} in config.json",
                            weights.path(), tensors, key, value));
}

/// `read(begin, out)` reads elements of the full tensor. `values`: the parameter's local_range.
template <typename Read>
void read_shard(const LocalShard& shard, const Tensor& values, const Read& read) {
  if (shard.columns == shard.whole_columns && shard.row_stride == shard.columns) {  // contiguous
    return read(shard.first, values);
  }
  for (int64_t row = 0; row < shard.rows && shard.columns > 0; ++row) {
    read(shard.first + row * shard.whole_columns,
         values.narrow(0, row * shard.row_stride, shard.columns));
  }
}

/// Multiplies the codes of a shard by their scales.
void apply_scales(const WeightScales& scales, const LocalShard& shard, const Tensor& values) {
  for (int64_t row = 0; row < shard.rows && shard.columns > 0; ++row) {
    const int64_t first = shard.first + row * shard.whole_columns;
    scales.apply(first / shard.whole_columns, first % shard.whole_columns,
                 values.narrow(0, row * shard.row_stride, shard.columns));
  }
}

/// Non-finite element of a rank's shard of a parameter.
struct BadElement {
  int64_t element;  ///< index in the full tensor
  float value;
};

/// `values`: the parameter's local_range.
std::optional<BadElement> find_not_finite(const LocalShard& shard, const Tensor& values) {
  for (int64_t row = 0; row < shard.rows && shard.columns > 0; ++row) {
    const Tensor local = values.narrow(0, row * shard.row_stride, shard.columns);
    if (const auto bad = first_not_finite(local)) {
      return BadElement{shard.first + row * shard.whole_columns + int64_t(*bad),
                        local.as<const float>()[*bad]};
    }
  }
  return std::nullopt;
}

/// `scales`: without a file unless the tensor has codes.
void load_parameter(const StoredTensor& tensor, const StoredTensor& scales,
                    const WeightQuantization& quantization, const Parameter& p, const Exec& exec,
                    const Tensor& values) {
  const SafetensorsFile& file = *tensor.file;
  const LocalShard shard = local_shard(p);
  const FlatRange range = local_range(p);
  const HostCopy local(exec, values.narrow(0, range.begin, range.count));
  read_shard(shard, local.tensor(), [&](int64_t begin, const Tensor& to) {
    const std::span out = host_values(to);
    scales ? file.read_codes(*tensor.entry, begin, out) : file.read_f32(*tensor.entry, begin, out);
  });
  if (scales && range.count > 0) {
    apply_scales({*scales.file, *scales.entry, *tensor.entry, quantization}, shard, local.tensor());
  }
  if (const auto bad = find_not_finite(shard, local.tensor())) {
    throw IoError(fmt::format("{}: tensor '{}': element {} is {}: expected finite numbers",
                              file.path(), p.name, bad->element, bad->value));
  }
  local.store();
}

}  // namespace

std::string model_identity(const ModelConfig& config, const WeightFiles& weights) {
  const WeightQuantization& q = weights.quantization();
  return fmt::format("config {}, weights {}{}", content_hash(to_json(config)), weights.identity(),
                     q.method.empty() ? ""
                                      : fmt::format(", {} in blocks of {} x {}", q.method,
                                                    q.block_rows, q.block_columns));
}

void require_same_tensors(const ModelConfig& config, const WeightFiles& weights) {
  require_at_most(weights, "num_hidden_layers", config.layers);
  require_at_most(weights, "num_local_experts x layers of experts",
                  config.experts * config.moe_layers());
  std::vector<std::string> known;
  for (const Parameter& p : ModelLayout(config, 1, 0).parameters) {
    const StoredTensor tensor = weights.require(p.name, p.shape);
    known.push_back(p.name);
    if (const StoredTensor scales = weights.require_scales(tensor)) {
      known.push_back(scales.entry->name);
    }
  }
  std::ranges::sort(known);
  const StoredTensor* first = nullptr;
  size_t count = 0;
  for (const StoredTensor& tensor : weights.tensors()) {
    if (std::ranges::binary_search(known, tensor.entry->name) ||
        is_redundant(config, weights, tensor)) {
      continue;
    }
    if (count++ == 0) first = &tensor;
  }
  if (count == 0) return;
  throw IoError(fmt::format(
      "{}: tensor '{}' is not read by the model of config.json (1 of {} such, of {}): expected no "
      "others than its {}",
      first->file->path(), printable(first->entry->name), count, weights.tensors().size(),
      known.size()));
}

std::optional<size_t> first_not_finite(const Tensor& tensor) {
  const std::span values = host_values(tensor);
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
    load_parameter({&file, &file.require(p.name, p.shape)}, {}, {}, p, exec, values);
  }
}

void load_parameters(const WeightFiles& files, const std::vector<Parameter>& parameters,
                     const Exec& exec, const Tensor& values) {
  for (const Parameter& p : parameters) {
    const StoredTensor tensor = files.require(p.name, p.shape);
    load_parameter(tensor, files.require_scales(tensor), files.quantization(), p, exec, values);
  }
}

}  // namespace tandem
