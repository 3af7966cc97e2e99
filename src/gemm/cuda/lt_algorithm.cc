#include "gemm/cuda/lt_algorithm.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr size_t kSimple = ~size_t(0);
constexpr int kSuggestions = 16;

template <typename T = uint32_t>
uint64_t attribute_of(const Chosen& chosen, cublasLtMatmulAlgoConfigAttributes_t which) {
  T value = 0;
  size_t written = 0;
  check(cublasLtMatmulAlgoConfigGetAttribute(&chosen.algorithm, which, &value, sizeof value,
                                             &written),
        "cublasLtMatmulAlgoConfigGetAttribute");
  return value;
}

}  // namespace

void check(cublasStatus_t code, const char* what) {
  if (code != CUBLAS_STATUS_SUCCESS) {
    throw DeviceError(fmt::format("{}: {}", what, cublasLtGetStatusString(code)));
  }
}

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f16:
      return CUDA_R_16F;
    case DType::e4m3:
      return CUDA_R_8F_E4M3;
    case DType::i32:
    case DType::u8:
      break;
  }
  throw InvalidArgument(
      fmt::format("gemm: dtype {}: expected bf16, f16, f32 or e4m3", name_of(dtype)));
}

GemmChoice choice_of(const Chosen& chosen) {
  GemmChoice choice;
  choice.algorithm = {attribute_of(chosen, CUBLASLT_ALGO_CONFIG_ID),
                      attribute_of(chosen, CUBLASLT_ALGO_CONFIG_TILE_ID),
                      attribute_of(chosen, CUBLASLT_ALGO_CONFIG_STAGES_ID),
                      attribute_of(chosen, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
                      attribute_of(chosen, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME),
                      attribute_of(chosen, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
                      attribute_of(chosen, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
                      attribute_of<uint16_t>(chosen, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID) << 16 |
                          attribute_of<uint16_t>(chosen, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID)};
  choice.workspace = chosen.workspace;
  return choice;
}

// cuBLASLt is column-major: `rows` is the contiguous dimension.
Layout make_layout(DType dtype, int64_t rows, int64_t columns) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublasLtMatrixLayoutCreate(&layout, cuda_type(dtype), uint64_t(rows), uint64_t(columns),
                                   rows),
        "cublasLtMatrixLayoutCreate");
  return Layout(layout);
}

std::vector<Chosen> suggest_algorithms(cublasLtHandle_t handle, cublasLtMatmulDesc_t op,
                                       const MatrixLayouts& layouts,
                                       const AlgorithmLimits& limits) {
  cublasLtMatmulPreference_t preference = nullptr;
  check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value);
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, limits.workspace);
  // Reductions through a workspace have a fixed order; in-place ones do not.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      uint32_t(limits.may_split ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
                                : CUBLASLT_REDUCTION_SCHEME_NONE));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, limits.weight_alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, limits.x_alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, limits.out_alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, limits.out_alignment);
  std::vector<cublasLtMatmulHeuristicResult_t> found(kSuggestions);
  int count = 0;
  const cublasStatus_t code =
      cublasLtMatmulAlgoGetHeuristic(handle, op, layouts.weight, layouts.x, layouts.out,
                                     layouts.out, preference, kSuggestions, found.data(), &count);
  cublasLtMatmulPreferenceDestroy(preference);
  std::vector<Chosen> result;
  for (int i = 0; code == CUBLAS_STATUS_SUCCESS && i < count; ++i) {
    const Chosen each{found[size_t(i)].algo, found[size_t(i)].workspaceSize, 0};
    if (limits.may_split || attribute_of(each, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1) {
      result.push_back(each);
    }
  }
  return result;
}

Chosen simple() {
  return {{}, kSimple, 0};
}
bool is_simple(const Chosen& chosen) {
  return chosen.workspace == kSimple;
}

}  // namespace tandem::gpu
