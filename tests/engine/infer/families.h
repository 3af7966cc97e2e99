// Folders of small models whose weights are a function of tensor names (families/make.py).
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tandem/dtype.h"

namespace tandem::test {

struct FamilyCase {
  std::string name;
  nlohmann::ordered_json expected;  ///< config, tokens, logits, nll: what transformers computed
};
std::vector<FamilyCase> family_cases();

/// Element of a tensor, a multiple of a power of two with 7 bits: the same in f32, bf16 and f16.
float weight(const std::string& name, uint64_t index);

/// Writes config.json and the weights: `files` files with an index, or model.safetensors.
void write_folder(const std::string& folder, const nlohmann::ordered_json& config, DType dtype,
                  size_t files);

/// Empty folder of this process.
std::string make_scratch_folder(const std::string& name);

}  // namespace tandem::test
