// Trained model on disk: config.json and the files of weights (weight_files.h), in Hugging Face's
// layout.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/formats/safetensors.h"
#include "engine/model/config.h"
#include "engine/model/transformer.h"
#include "engine/model/weight_files.h"

namespace tandem {

/// Hashes of the model's configuration and weights; changes if either does. Throws IoError.
std::string model_identity(const ModelConfig& config, const WeightFiles& weights);

/// Throws IoError naming the tensor unless the files have all tensors that the model reads, in
/// these shapes, and no other: a layer missing in config.json, or a bias, would change the result.
void require_same_tensors(const ModelConfig& config, const WeightFiles& weights);

/// Index of the first element that is NaN or infinite. `values`: f32, contiguous, on the host.
std::optional<size_t> first_not_finite(const Tensor& values);

/// Reads this rank's shard of every parameter (f32, bf16 or f16 on disk; of WeightFiles also e4m3,
/// whose codes are multiplied by their scales) into a flat array. Throws IoError naming the tensor
/// that is missing, has another shape or a non-finite element.
void load_parameters(const SafetensorsFile& file, const std::vector<Parameter>& parameters,
                     const Exec& exec, const Tensor& values);
void load_parameters(const WeightFiles& files, const std::vector<Parameter>& parameters,
                     const Exec& exec, const Tensor& values);

}  // namespace tandem
