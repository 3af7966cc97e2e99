// Device matrices for tests, and the comparison of a GEMM result with the exact one.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "bench/cuda/verify.h"
#include "comm/device/gpu_communicator.h"
#include "overlap/contract/cuda/dense.h"
#include "tests/overlap/cuda/candidates.h"

namespace tandem::test {

struct Matrix {
  gpu::DeviceMemory memory;
  Tensor tensor;
  Matrix(DType dtype, std::initializer_list<int64_t> shape)
      : memory(size_t(Tensor(nullptr, dtype, shape).bytes())), tensor(memory.view(dtype, shape)) {}
  Matrix(DType dtype, int64_t rows, int64_t columns) : Matrix(dtype, {rows, columns}) {}
};

/// Reference of AG+GEMM on this rank: x from stream 100, and a weight per rank.
inline gpu::ProductReference ag_reference(const gpu::GpuCommunicator& comm, const OpDesc& s,
                                          uint64_t seed) {
  return {seed, 100, 200 + uint64_t(comm.rank()), 1, s.k, 0, s.dtype};
}

/// Reference of GEMM+RS (scattered) or GEMM+AR: partial products from streams 100 and 201 + rank.
inline gpu::ProductReference sum_reference(const gpu::GpuCommunicator& comm, const OpDesc& s,
                                           bool scattered, uint64_t seed) {
  const int64_t first = scattered ? shard_of(s.m, comm.size(), comm.rank()).begin : 0;
  return {seed, 100, 201, comm.size(), s.k, first, s.dtype};
}

/// `candidate`: name of the one that computed `out`. Rounded running sums are accepted only from
/// those declared to round them.
inline void expect_right(gpu::GpuCommunicator& comm, const Tensor& out,
                         gpu::ProductReference reference, const std::string& what,
                         std::string_view candidate = "chunked") {
  comm.synchronize();
  reference.roundings = gpu::roundings_of(candidate, reference.terms);
  const gpu::Verdict verdict = gpu::verify_product(out, reference, out.elements(), comm.stream());
  EXPECT_LE(verdict.of_bound, 1) << what;
  EXPECT_EQ(verdict.not_finite, 0) << what;
}

}  // namespace tandem::test
