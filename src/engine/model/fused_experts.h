// Experts of a layer as the tensors that GPT-OSS's files have: gate and up of all experts in one,
// whose rows alternate, and down in another, transposed; their biases likewise. Elements of
// parameters are strided there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/config.h"

namespace tandem {

/// Parameter in a tensor on disk: its element [row, column] is first + row x row_stride + column x
/// column_stride there. A vector is one row.
struct ExpertSlice {
  std::string name;
  std::vector<int64_t> shape;
  int64_t first, row_stride, column_stride;
};

struct ExpertTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<ExpertSlice> slices;  ///< expert by expert
  bool is_matrix;
};

/// Orders of a matrix's elements: [experts, input features, output features], or, in blocks of
/// MXFP4, [experts, output features, input features].
enum class ExpertOrder : uint8_t { transposed, by_rows };

/// Tensors of a layer with experts, of a model with fused_experts.
std::vector<ExpertTensor> expert_tensors(const ModelConfig& config, int64_t layer,
                                         ExpertOrder order = ExpertOrder::transposed);

}  // namespace tandem
