#include "gemm/cuda/lt_algorithm.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr size_t kSimple = ~size_t(0);

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

Chosen simple() {
  return {{}, kSimple, 0};
}
bool is_simple(const Chosen& chosen) {
  return chosen.workspace == kSimple;
}

}  // namespace tandem::gpu
