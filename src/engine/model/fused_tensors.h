// Tensors on disk that hold several parameters, one after the other by rows: qkv_proj and
// gate_up_proj of Phi-3; and those of experts, which are strided. Parameters are separate
// everywhere else, in checkpoints too.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/model/config.h"
#include "engine/model/parameter.h"

namespace tandem {

struct FusedSlice {
  std::string name;  ///< of the parameter
  int64_t rows;
};
/// Slices of a tensor of such a model in the order of its rows; empty if it is not fused.
std::vector<FusedSlice> fused_slices(const ModelConfig& config, std::string_view tensor);

/// Parameter in a tensor on disk, by its number; strides as of ExpertSlice (fused_experts.h).
struct StoredParameter {
  size_t parameter;
  int64_t first = 0, row_stride = 0, column_stride = 1;
};
/// Tensor on disk.
struct StoredParameters {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<StoredParameter> slices;
  bool is_strided = false;  ///< else its parameters are one after the other, without gaps
};
/// Tensors of the model's files, in the order of its parameters.
std::vector<StoredParameters> stored_parameters(const ModelConfig& config,
                                                const std::vector<Parameter>& parameters);

}  // namespace tandem
