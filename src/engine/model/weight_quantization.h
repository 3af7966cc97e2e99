// Matrices that a model's files hold as e4m3 codes and scales, by quantization_config of its
// config.json: blocks as DeepSeek-V3 has them (quant_method "fp8", weight_block_size), or a scale
// of a matrix or of each row, as compressed-tensors and FBGEMM write them. Value = code x scale.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/formats/safetensors.h"
#include "tandem/tensor.h"

namespace tandem {

constexpr const char* kQuantizationKey = "quantization_config";

struct WeightQuantization {
  std::string method;  ///< quant_method; empty: no matrix has codes
  /// Rows and columns of a matrix with one scale; 0: all columns, and all rows or each one, by the
  /// shape of the scales.
  int64_t block_rows = 0, block_columns = 0;
  bool operator==(const WeightQuantization&) const = default;
};

/// Parses the value of quantization_config in `file`. `unused` receives the names of keys without
/// effect on weights: how activations are quantized. Throws ConfigError naming the key.
WeightQuantization parse_weight_quantization(const nlohmann::ordered_json& value,
                                             const std::string& file,
                                             std::vector<std::string>& unused);
/// Reads it from a model's folder; without a method if it has no config.json or no such key.
WeightQuantization read_weight_quantization(const std::string& folder);

/// Scales of one matrix.
class WeightScales {
 public:
  /// `scales`: a tensor of `file` for `matrix`. Throws IoError naming file and tensor for another
  /// shape or dtype than the quantization has, and for a scale that is not finite.
  WeightScales(const SafetensorsFile& file, const SafetensorsEntry& scales,
               const SafetensorsEntry& matrix, const WeightQuantization& quantization);
  /// Multiplies codes in a row of the matrix, from `column` on, by their scales. f32, contiguous,
  /// on the host.
  void apply(int64_t row, int64_t column, const Tensor& codes) const;

 private:
  int64_t block_rows_, block_columns_, columns_;  // of the scales
  std::vector<float> values_;
};

/// Text on the scales that a matrix needs: "f32, bf16 or f16 [2, 3], of blocks of 128 x 128".
std::string describe_scales(const SafetensorsEntry& matrix, const WeightQuantization& quantization);
/// Throws IoError unless the scales have a dtype and a shape for the matrix.
void check_scales(const std::string& file, const SafetensorsEntry& scales,
                  const SafetensorsEntry& matrix, const WeightQuantization& quantization);

}  // namespace tandem
