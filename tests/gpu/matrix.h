// Device matrices for tests, and the comparison of a product with the exact one.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "comm/nccl/nccl_communicator.h"
#include "kernels/cuda/verify.h"

namespace tandem::test {

struct Matrix {
  gpu::DeviceMemory memory;
  Tensor tensor;
  Matrix(DType dtype, int64_t rows, int64_t columns)
      : memory(size_t(rows * columns) * size_of(dtype)),
        tensor(memory.view(dtype, {rows, columns})) {}
};

/// `reference.roundings` as for NCCL, which the strategy may have taken.
inline void expect_right(gpu::NcclCommunicator& comm, const Tensor& out,
                         gpu::ProductReference reference, const std::string& what) {
  comm.synchronize();
  reference.roundings = reference.terms;
  const gpu::Verdict verdict = gpu::verify_product(out, reference, out.elements(), comm.stream());
  EXPECT_LE(verdict.of_bound, 1) << what;
  EXPECT_EQ(verdict.not_finite, 0) << what;
}

}  // namespace tandem::test
