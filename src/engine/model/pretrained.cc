#include "engine/model/pretrained.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/host_copy.h"
#include "core/system/files.h"
#include "core/system/printable.h"
#include "engine/model/layout.h"
#include "kernels/elementwise.h"
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

/// Elements [begin, begin + out.elements()) of a tensor, in the dtype of `out`.
void read_elements(const StoredTensor& tensor, bool has_scales, int64_t begin, const Tensor& out) {
  const SafetensorsFile& file = *tensor.file;
  if (out.dtype() == DType::bf16) return file.read(*tensor.entry, begin, out);
  const std::span values = host_values(out);
  has_scales ? file.read_codes(*tensor.entry, begin, values)
             : file.read_f32(*tensor.entry, begin, values);
}

/// Reads rows of a shard, of which `out` has [rows, columns].
void read_rows(const StoredTensor& tensor, const std::optional<WeightScales>& scales,
               const LocalShard& shard, int64_t first_row, const Tensor& out) {
  const int64_t begin = shard.first + first_row * shard.whole_columns;
  if (tensor.slice) {
    return read_slice(*tensor.slice, begin / shard.whole_columns, begin % shard.whole_columns, out);
  }
  const bool is_whole = shard.columns == shard.whole_columns;
  for (int64_t row = 0; row < (is_whole ? 1 : out.dim(0)); ++row) {
    read_elements(tensor, scales.has_value(), begin + row * shard.whole_columns,
                  is_whole ? out : out.rows(row, 1));
  }
  for (int64_t row = 0; scales && row < out.dim(0); ++row) {
    const int64_t first = begin + row * shard.whole_columns;
    scales->apply(first / shard.whole_columns, first % shard.whole_columns, out.rows(row, 1));
  }
}

/// Shard of a matrix that is transposed on disk, f32 [rows, columns]; of others nothing.
class TransposedShard {
 public:
  TransposedShard(const StoredTensor& tensor, const LocalShard& shard, const WeightViews& to) {
    const bool is_read = tensor.slice && is_transposed(*tensor.slice) && to.bytes() > 0;
    if (!is_read || shard.rows < 2 || shard.columns == 0) return;
    memory_ = Memory(size_t(shard.rows * shard.columns) * sizeof(float));
    values_ = memory_.view(DType::f32, {shard.rows, shard.columns});
    read_slice(*tensor.slice, shard.first / shard.whole_columns, shard.first % shard.whole_columns,
               values_);
  }
  const Tensor& values() const { return values_; }

 private:
  Memory memory_;
  Tensor values_;
};

/// Value as text.
std::string describe_element(const Tensor& values, size_t index) {
  return fmt::format("{}", values.dtype() == DType::bf16
                               ? values.as<const BFloat16>()[index].to_float()
                               : values.as<const float>()[index]);
}

/// `scales`: without a file unless the tensor has codes.
void read_parameter(const StoredTensor& tensor, const StoredTensor& stored_scales,
                    const WeightQuantization& quantization, const Parameter& p,
                    WeightWriter& writer, const WeightViews& to) {
  std::optional<WeightScales> scales;
  const LocalShard shard = local_shard(p);
  if (stored_scales && shard.rows > 0 && shard.columns > 0) {
    scales.emplace(*stored_scales.file, *stored_scales.entry, *tensor.entry, quantization);
  }
  const TransposedShard transposed(tensor, shard, to);
  writer.write(shard, to, tensor.entry->dtype, [&](int64_t first_row, const Tensor& out) {
    if (transposed.values().dims() > 0) {
      cast(Exec{}, transposed.values().rows(first_row, out.dim(0)), out);
    } else {
      read_rows(tensor, scales, shard, first_row, out);
    }
    const auto bad = first_not_finite(out);
    if (!bad) return;
    const int64_t row = first_row + int64_t(*bad) / shard.columns;
    throw IoError(fmt::format(
        "{}: tensor '{}': element {} is {}: expected finite numbers", tensor.file->path(), p.name,
        shard.first + row * shard.whole_columns + int64_t(*bad) % shard.columns,
        describe_element(out, *bad)));
  });
}

/// Whether a number in these words, one in f32 or two in bf16, is NaN or infinite: to one with all
/// bits of the exponent, `exponents`, the lowest of them adds the bit of the sign.
bool has_not_finite(const void* words, size_t count, uint32_t exponents, uint32_t lowest) {
  const uint32_t signs = exponents + lowest;
  uint32_t found = 0;
#pragma omp simd reduction(| : found)
  for (size_t i = 0; i < count; ++i) {
    uint32_t word = 0;
    std::memcpy(&word, static_cast<const std::byte*>(words) + i * sizeof word, sizeof word);
    found |= (word & exponents) + lowest;
  }
  return (found & signs) != 0;
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
  const auto count = size_t(tensor.elements());
  const auto find = [&]<typename Value>(std::span<const Value> values, const auto& to_float) {
    const auto bad = std::ranges::find_if_not(
        values, [&](const Value& value) { return std::isfinite(to_float(value)); });
    return bad == values.end() ? std::nullopt : std::optional(size_t(bad - values.begin()));
  };
  if (tensor.dtype() == DType::bf16) {
    const std::span values(tensor.as<const BFloat16>(), count);
    const auto to_float = [](BFloat16 x) { return x.to_float(); };
    const size_t pairs = count / 2 * 2;
    if (has_not_finite(values.data(), pairs / 2, 0x7f807f80, 0x00800080)) {
      return find(values, to_float);
    }
    const auto last = find(values.subspan(pairs), to_float);
    return last ? std::optional(pairs + *last) : std::nullopt;
  }
  const std::span values(tensor.as<const float>(), count);
  if (!has_not_finite(values.data(), count, 0x7f800000, 0x00800000)) return std::nullopt;
  return find(values, [](float x) { return x; });
}

ParameterReader::ParameterReader(const WeightFiles& files, const Exec& exec, bool pins)
    : files_(files), writer_(exec, pins) {}

void ParameterReader::read(const Parameter& p, const WeightViews& to) {
  const StoredTensor tensor = files_.require(p.name, p.shape);
  read_parameter(tensor, files_.require_scales(tensor), files_.quantization(), p, writer_, to);
  const LocalShard shard = local_shard(p);
  if (to.bytes() == 0) return;
  const int64_t elements = shard.rows * shard.columns;
  const bool is_packed = tensor.slice && tensor.slice->scales;
  bytes_ += is_packed ? elements / 2 : elements * int64_t(size_of(tensor.entry->dtype));
}

void load_parameters(const SafetensorsFile& file, const std::vector<Parameter>& parameters,
                     const Exec& exec, const WeightViews& to) {
  WeightWriter writer(exec, false);
  for (const Parameter& p : parameters) {
    read_parameter({&file, &file.require(p.name, p.shape)}, {}, {}, p, writer,
                   to.narrow(local_range(p)));
  }
}

void load_parameters(const WeightFiles& files, const std::vector<Parameter>& parameters,
                     const Exec& exec, const WeightViews& to) {
  ParameterReader reader(files, exec, false);
  for (const Parameter& p : parameters) reader.read(p, to.narrow(local_range(p)));
}

}  // namespace tandem
