// Kernels of coded weights (coded_product.cuh) by format; operands as coded_gemm takes them.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/cuda/coded_gemm.h"

namespace tandem::gpu {

void launch_int8_gemm(cudaStream_t stream, const CodedMatrix& weight, const Tensor& x,
                      const Tensor& out, const CodedGemmOptions& options);
void launch_e4m3_gemm(cudaStream_t stream, const CodedMatrix& weight, const Tensor& x,
                      const Tensor& out, const CodedGemmOptions& options);

}  // namespace tandem::gpu
