// An algorithm of cuBLASLt, or our fallback, as chosen for a GEMM.
#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "gemm/gemm_choice.h"
#include "tandem/dtype.h"

namespace tandem::gpu {

/// Throws DeviceError unless `code` is success.
void check(cublasStatus_t code, const char* what);

/// Throws InvalidArgument for i32 and u8.
cudaDataType_t cuda_type(DType dtype);

struct DestroyLayout {
  void operator()(cublasLtMatrixLayout_t layout) const { cublasLtMatrixLayoutDestroy(layout); }
};
using Layout = std::unique_ptr<std::remove_pointer_t<cublasLtMatrixLayout_t>, DestroyLayout>;

/// cuBLASLt is column-major: `rows` is the contiguous dimension.
Layout make_layout(DType dtype, int64_t rows, int64_t columns);

struct Chosen {
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
  double us;
};

/// Algorithm of a shape's GEMMs, which read it at each call.
class Selected {
 public:
  explicit Selected(const Chosen& chosen) : chosen_(chosen) {}
  Chosen get() const {
    const std::lock_guard lock(mutex_);
    return chosen_;
  }
  void set(const Chosen& chosen) {
    const std::lock_guard lock(mutex_);
    chosen_ = chosen;
  }

 private:
  mutable std::mutex mutex_;
  Chosen chosen_;
};

struct MatrixLayouts {
  cublasLtMatrixLayout_t weight, x, out;
};

struct AlgorithmLimits {
  size_t workspace;       ///< bytes, at most
  bool may_split = true;  ///< k among blocks, whose sums have a fixed order
  uint32_t weight_alignment = 256, x_alignment = 256, out_alignment = 256;  ///< of addresses
};

/// Algorithms that the library suggests, the most promising first; none if it has none.
std::vector<Chosen> suggest_algorithms(cublasLtHandle_t handle, cublasLtMatmulDesc_t op,
                                       const MatrixLayouts& layouts, const AlgorithmLimits& limits);

/// Attributes that identify the algorithm.
GemmChoice choice_of(const Chosen& chosen);

/// The fallback kernel (simple_gemm.h) instead of an algorithm of the library.
Chosen simple();
bool is_simple(const Chosen& chosen);

}  // namespace tandem::gpu
