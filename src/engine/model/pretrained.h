// A trained model on disk: DIR/config.json and DIR/model.safetensors, in Hugging Face's layout.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/safetensors.h"
#include "engine/model/config.h"
#include "engine/model/transformer.h"

namespace tandem {

/// Changes when the model does: hashes of its configuration and of its weights. Throws IoError.
std::string model_identity(const ModelConfig& config, const SafetensorsFile& weights);

/// Throws IoError naming the tensor unless the file has all that the model reads, in these shapes,
/// and no other: a layer that config.json leaves out, or a bias, would change what is computed.
void require_same_tensors(const ModelConfig& config, const SafetensorsFile& weights);

/// An element of a rank's part of a parameter.
struct BadElement {
  int64_t element;  ///< of the whole tensor
  float value;
};
/// The first that is NaN or infinite.
std::optional<BadElement> first_not_finite(const Parameter& parameter,
                                           std::span<const float> values);

/// Reads this rank's shard of every parameter (f32, bf16 or f16 on disk). Throws IoError naming the
/// tensor that is missing, has another shape, or an element that is no finite number.
void load_parameters(const SafetensorsFile& file, const std::vector<Parameter>& parameters,
                     std::span<float> values);

}  // namespace tandem
