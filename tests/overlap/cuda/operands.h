// Random operands of a dense operator on one rank, and the exact product of its output.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "bench/cuda/verify.h"
#include "overlap/contract/cuda/dense.h"
#include "tests/overlap/cuda/matrix.h"

namespace tandem::test {

// One operator's operands on one rank, and the expected output. Each begins `skip` bytes into an
// allocation.
struct Operands {
  Operands(gpu::GpuCommunicator& comm, const OpDesc& shape, int64_t x_rows, int64_t x_first,
           int64_t out_rows, gpu::ProductReference reference_, uint64_t stream_offset, size_t skip)
      : reference(reference_),
        x_memory(size_t(x_rows * shape.k) * size_of(shape.dtype) + skip),
        w_memory(size_t(shape.n * shape.k) * size_of(shape.dtype) + skip),
        out_memory(size_t(out_rows * shape.n) * size_of(shape.dtype) + skip),
        x(view(x_memory, skip, shape.dtype, x_rows, shape.k)),
        weight(view(w_memory, skip, shape.dtype, shape.n, shape.k)),
        out(view(out_memory, skip, shape.dtype, out_rows, shape.n)) {
    gpu::fill_uniform(x, reference.seed, reference.x_stream + stream_offset, x_first * shape.k,
                      comm.stream());
    gpu::fill_uniform(weight, reference.seed, reference.w_stream + stream_offset, 0, comm.stream());
  }
  static Tensor view(const gpu::DeviceMemory& memory, size_t skip, DType dtype, int64_t rows,
                     int64_t columns) {
    const Tensor all = memory.view(DType::u8, {int64_t(memory.bytes())});
    return Tensor(static_cast<std::byte*>(all.data()) + skip, dtype, {rows, columns}, all.device());
  }
  gpu::ProductReference reference;
  gpu::DeviceMemory x_memory, w_memory, out_memory;
  Tensor x, weight, out;
};

inline Operands ag_operands(gpu::GpuCommunicator& comm, const OpDesc& s, uint64_t seed,
                            size_t skip = 0) {
  const Shard local = shard_of(s.m, comm.size(), comm.rank());
  return Operands(comm, s, local.count, local.begin, s.m, ag_reference(comm, s, seed), 0, skip);
}

inline Operands sum_operands(gpu::GpuCommunicator& comm, const OpDesc& s, bool scattered,
                             uint64_t seed, size_t skip = 0) {
  const Shard local = shard_of(s.m, comm.size(), comm.rank());
  return Operands(comm, s, s.m, 0, scattered ? local.count : s.m,
                  sum_reference(comm, s, scattered, seed), uint64_t(comm.rank()), skip);
}

inline void expect_right(gpu::GpuCommunicator& comm, const Operands& o, const std::string& what,
                         std::string_view candidate = "chunked") {
  expect_right(comm, o.out, o.reference, what, candidate);
}

}  // namespace tandem::test
