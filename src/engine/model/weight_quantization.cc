#include "engine/model/weight_quantization.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "core/system/files.h"
#include "core/system/json.h"
#include "engine/model/config_value.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

/// Key of quantization_config or of an object in it.
struct KnownKey {
  enum Effect : uint8_t {
    read,   ///< by its own code
    fixed,  ///< has this value, or is null
    none,   ///< on weights
    noted   ///< none, but on what other programs compute
  };
  std::string_view name;
  Effect effect;
  const char* value = nullptr;  ///< JSON
};

constexpr KnownKey kFp8Keys[] = {
    {"quant_method", KnownKey::read},     {"weight_block_size", KnownKey::read},
    {"fmt", KnownKey::fixed, "\"e4m3\""}, {"activation_scheme", KnownKey::noted},
    {"scale_fmt", KnownKey::noted},       {"modules_to_not_convert", KnownKey::none},
    {"ignored_layers", KnownKey::none}};
constexpr KnownKey kMxfp4Keys[] = {{"quant_method", KnownKey::read},
                                   {"modules_to_not_convert", KnownKey::none}};
constexpr KnownKey kFbgemmKeys[] = {{"quant_method", KnownKey::read},
                                    {"activation_scale_ub", KnownKey::noted},
                                    {"modules_to_not_convert", KnownKey::none}};
constexpr KnownKey kCompressedKeys[] = {{"quant_method", KnownKey::read},
                                        {"config_groups", KnownKey::read},
                                        {"format", KnownKey::fixed, "\"float-quantized\""},
                                        {"quantization_status", KnownKey::fixed, "\"compressed\""},
                                        {"ignore", KnownKey::none},
                                        {"version", KnownKey::none},
                                        {"global_compression_ratio", KnownKey::none}};
constexpr KnownKey kGroupKeys[] = {{"weights", KnownKey::read},
                                   {"format", KnownKey::fixed, "\"float-quantized\""},
                                   {"input_activations", KnownKey::noted},
                                   {"targets", KnownKey::none}};
constexpr KnownKey kGroupWeightKeys[] = {
    {"strategy", KnownKey::read},           {"block_structure", KnownKey::read},
    {"num_bits", KnownKey::fixed, "8"},     {"type", KnownKey::fixed, "\"float\""},
    {"symmetric", KnownKey::fixed, "true"}, {"dynamic", KnownKey::fixed, "false"},
    {"observer", KnownKey::none},           {"observer_kwargs", KnownKey::none},
    {"scale_dtype", KnownKey::none},        {"zp_dtype", KnownKey::none}};

class Parser {
 public:
  Parser(const std::string& file, std::vector<std::string>& unused)
      : file_(file), unused_(unused) {}

  WeightQuantization parse(const Json& root) {
    if (!root.is_object()) reject_value(file_, kQuantizationKey, root, "an object");
    const std::string path = kQuantizationKey;
    const Json method = member(root, "quant_method");
    if (method == "fp8") {
      check_keys(root, path, kFp8Keys);
      parse_block(member(root, "weight_block_size"), path + ".weight_block_size");
    } else if (method == "fbgemm_fp8") {
      check_keys(root, path, kFbgemmKeys);
    } else if (method == "mxfp4") {  // tensors of experts say so, too (weight_files.h)
      check_keys(root, path, kMxfp4Keys);
    } else if (method == "compressed-tensors") {
      check_keys(root, path, kCompressedKeys);
      parse_groups(member(root, "config_groups"), path + ".config_groups");
    } else {
      reject_value(file_, path + ".quant_method", method,
                   "\"fp8\", \"fbgemm_fp8\", \"mxfp4\" or \"compressed-tensors\"");
    }
    result_.method = method.get<std::string>();
    return result_;
  }

 private:
  static Json member(const Json& object, const char* key) {
    return object.contains(key) ? object[key] : Json();
  }

  void check_keys(const Json& object, const std::string& path, std::span<const KnownKey> known) {
    for (const auto& [key, value] : object.items()) {
      const std::string name = fmt::format("{}.{}", path, printable(key));
      const auto found = std::ranges::find(known, std::string_view(key), &KnownKey::name);
      const bool is_off =
          value.is_null() || value == false || (value.is_structured() && value.empty());
      if (found == known.end()) {
        if (!is_off) throw ConfigError(fmt::format("{}: unknown key {}", file_, name));
      } else if (found->effect == KnownKey::fixed) {
        if (!value.is_null() && value != Json::parse(found->value)) {
          reject_value(file_, name, value, found->value);
        }
      } else if (found->effect == KnownKey::noted && !is_off) {
        unused_.push_back(name);
      }
    }
  }

  void parse_block(const Json& block, const std::string& key) {
    if (block.is_null()) return;
    const auto extent = [&](size_t i) {
      const bool is_valid = block.is_array() && block.size() == 2 && block[i].is_number_integer() &&
                            block[i] > 0 && block[i] <= std::numeric_limits<int32_t>::max();
      if (!is_valid) reject_value(file_, key, block, "[rows, columns] of at least 1");
      return block[i].get<int64_t>();
    };
    result_.block_rows = extent(0);
    result_.block_columns = extent(1);
  }

  /// All groups must be scaled in the same way.
  void parse_groups(const Json& groups, const std::string& path) {
    if (!groups.is_object() || groups.empty()) {
      reject_value(file_, path, groups, "an object of groups");
    }
    bool is_first = true;
    for (const auto& [name, group] : groups.items()) {
      const std::string key = fmt::format("{}.{}", path, printable(name));
      if (!group.is_object()) reject_value(file_, key, group, "an object");
      check_keys(group, key, kGroupKeys);
      const WeightQuantization before = result_;
      parse_group(member(group, "weights"), key + ".weights");
      if (!is_first && result_ != before) {
        reject_value(file_, key + ".weights", group["weights"], "the blocks of the group before");
      }
      is_first = false;
    }
  }

  void parse_group(const Json& weights, const std::string& key) {
    if (!weights.is_object()) reject_value(file_, key, weights, "an object");
    check_keys(weights, key, kGroupWeightKeys);
    const Json strategy = member(weights, "strategy"), block = member(weights, "block_structure");
    const bool has_blocks = strategy == "block";
    if (!has_blocks && strategy != "tensor" && strategy != "channel") {
      reject_value(file_, key + ".strategy", strategy, "\"tensor\", \"channel\" or \"block\"");
    }
    result_ = {};
    if (has_blocks == block.is_null()) {
      reject_value(file_, key + ".block_structure", block,
                   has_blocks ? "[rows, columns] with strategy \"block\""
                              : "null without strategy \"block\"");
    }
    parse_block(block, key + ".block_structure");
  }

  const std::string& file_;
  std::vector<std::string>& unused_;
  WeightQuantization result_;
};

int64_t divide_up(int64_t value, int64_t by) {
  return value / by + (value % by != 0);
}

/// Shape of the scales of blocks.
std::vector<int64_t> block_grid(const SafetensorsEntry& matrix, const WeightQuantization& q) {
  return {divide_up(matrix.shape[0], q.block_rows), divide_up(matrix.shape[1], q.block_columns)};
}

bool has_shape_for(const SafetensorsEntry& scales, const SafetensorsEntry& matrix,
                   const WeightQuantization& q) {
  if (q.block_rows > 0) return scales.shape == block_grid(matrix, q);
  const int64_t rows = scales.shape.empty() ? 1 : scales.shape[0];
  const bool is_vector =
      scales.shape.size() < 2 || (scales.shape.size() == 2 && scales.shape[1] == 1);
  return is_vector && (rows == 1 || rows == matrix.shape[0]);
}

}  // namespace

WeightQuantization parse_weight_quantization(const Json& value, const std::string& file,
                                             std::vector<std::string>& unused) {
  return Parser(file, unused).parse(value);
}

WeightQuantization read_weight_quantization(const std::string& folder) {
  const std::string file = folder + "/config.json";
  if (!path_exists(file)) return {};
  const Json root = parse_json<Json>(read_small_file(file));
  if (!root.is_object() || !root.contains(kQuantizationKey) || root[kQuantizationKey].is_null()) {
    return {};
  }
  std::vector<std::string> unused;
  return parse_weight_quantization(root[kQuantizationKey], file, unused);
}

std::string describe_scales(const SafetensorsEntry& matrix, const WeightQuantization& q) {
  if (q.block_rows == 0) {
    return fmt::format("f32, bf16 or f16 [{}, 1] or [1], the scales of '{}'", matrix.shape[0],
                       printable(matrix.name));
  }
  return fmt::format("f32, bf16 or f16 [{}], the scales of '{}' in blocks of {} x {}",
                     fmt::join(block_grid(matrix, q), ", "), printable(matrix.name), q.block_rows,
                     q.block_columns);
}

void check_scales(const std::string& file, const SafetensorsEntry& scales,
                  const SafetensorsEntry& matrix, const WeightQuantization& q) {
  const bool is_float =
      scales.dtype == DType::f32 || scales.dtype == DType::bf16 || scales.dtype == DType::f16;
  if (is_float && has_shape_for(scales, matrix, q)) return;
  reject_tensor(file, scales.name,
                fmt::format("{} [{}]: expected {}", name_of(scales.dtype),
                            fmt::join(scales.shape, ", "), describe_scales(matrix, q)));
}

WeightScales::WeightScales(const SafetensorsFile& file, const SafetensorsEntry& scales,
                           const SafetensorsEntry& matrix, const WeightQuantization& q) {
  check_scales(file.path(), scales, matrix, q);
  const bool has_blocks = q.block_rows > 0;
  const bool is_of_rows = !has_blocks && scales.elements() > 1;
  block_rows_ = has_blocks ? q.block_rows : is_of_rows ? 1 : std::max<int64_t>(1, matrix.shape[0]);
  block_columns_ = has_blocks ? q.block_columns : std::max<int64_t>(1, matrix.shape[1]);
  columns_ = has_blocks ? scales.shape[1] : 1;
  values_.resize(size_t(scales.elements()));
  file.read_f32(scales, 0, values_);
  const auto bad = std::ranges::find_if_not(values_, [](float x) { return std::isfinite(x); });
  if (bad == values_.end()) return;
  reject_tensor(
      file.path(), scales.name,
      fmt::format("element {} is {}: expected finite numbers", bad - values_.begin(), *bad));
}

void WeightScales::apply(int64_t row, int64_t column, const Tensor& codes) const {
  const float* const scales = values_.data() + row / block_rows_ * columns_;
  const int64_t end = column + codes.elements();
  auto* code = codes.as<float>();
  for (int64_t at = column; at < end;) {
    const int64_t block = at / block_columns_, next = std::min(end, (block + 1) * block_columns_);
    for (; at < next; ++at) *code++ *= scales[block];
  }
}

}  // namespace tandem
