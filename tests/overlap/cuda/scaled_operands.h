// Operands of a dense operator on one rank, with the scales of e4m3, and the exact product of its
// output.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "bench/cuda/verify.h"
#include "overlap/contract/cuda/dense.h"
#include "tests/overlap/cuda/matrix.h"

namespace tandem::test {

struct ScaledOperands {
  ScaledOperands(gpu::GpuCommunicator& comm, const OpDesc& s, int64_t x_rows, int64_t x_first,
                 int64_t out_rows, const gpu::ProductReference& ref, uint64_t stream_offset,
                 gpu::Values values)
      : reference(ref),
        x(s.dtype, {x_rows, s.k}),
        weight(s.dtype, {s.n, s.k}),
        out(s.result(), {out_rows, s.n}),
        x_scales(DType::f32, {s.scaled_by_row() ? x_rows : 1}),
        weight_scales(DType::f32, {s.scaled_by_row() ? s.n : 1}),
        scales{x_scales.tensor, weight_scales.tensor},
        scaled(s.scaled()) {
    reference.dtype = s.dtype;
    reference.values = values;
    reference.scaling = s.scaling;
    reference.x_scales = 300;
    reference.w_scales = ref.w_stream + 200;
    const cudaStream_t stream = comm.stream();
    gpu::fill_uniform(x.tensor, ref.seed, ref.x_stream + stream_offset, x_first * s.k, stream,
                      values);
    gpu::fill_uniform(weight.tensor, ref.seed, ref.w_stream + stream_offset, 0, stream, values);
    gpu::fill_scales(scales.x, ref.seed, 300 + stream_offset, s.scaled_by_row() ? x_first : 0,
                     stream);
    gpu::fill_scales(scales.weight, ref.seed, reference.w_scales + stream_offset, 0, stream);
  }
  const Scales* given() const { return scaled ? &scales : nullptr; }
  gpu::ProductReference reference;
  Matrix x, weight, out, x_scales, weight_scales;
  Scales scales;
  bool scaled;
};

/// Equal scales at another address, 16 bytes into an allocation.
struct MovedScales {
  MovedScales(gpu::GpuCommunicator& comm, const Scales& from)
      : x_memory(DType::f32, {from.x.elements() + 4}),
        weight_memory(DType::f32, {from.weight.elements() + 4}),
        scales{x_memory.tensor.rows(4, from.x.elements()),
               weight_memory.tensor.rows(4, from.weight.elements())} {
    copy(comm, from, scales);
  }
  static void copy(gpu::GpuCommunicator& comm, const Scales& from, const Scales& to) {
    for (const auto& [source, copied] : {std::pair(from.x, to.x), {from.weight, to.weight}}) {
      gpu::check(cudaMemcpyAsync(copied.data(), source.data(), source.bytes(), cudaMemcpyDefault,
                                 comm.stream()),
                 "copy scales");
    }
  }
  Matrix x_memory, weight_memory;
  Scales scales;
};

inline ScaledOperands scaled_ag_operands(gpu::GpuCommunicator& comm, const OpDesc& s, uint64_t seed,
                                         gpu::Values values = gpu::Values::any) {
  const Shard local = shard_of(s.m, comm.size(), comm.rank());
  return ScaledOperands(comm, s, local.count, local.begin, s.m, ag_reference(comm, s, seed), 0,
                        values);
}

inline ScaledOperands scaled_sum_operands(gpu::GpuCommunicator& comm, const OpDesc& s,
                                          bool scattered, uint64_t seed,
                                          gpu::Values values = gpu::Values::any) {
  const Shard local = shard_of(s.m, comm.size(), comm.rank());
  return ScaledOperands(comm, s, s.m, 0, scattered ? local.count : s.m,
                        sum_reference(comm, s, scattered, seed), uint64_t(comm.rank()), values);
}

inline void expect_right(gpu::GpuCommunicator& comm, const ScaledOperands& o,
                         const std::string& what, std::string_view candidate = "chunked") {
  expect_right(comm, o.out.tensor, o.reference, what, candidate);
}

/// Shape with e4m3 operands.
inline OpDesc scaled_shape(int64_t m, int64_t n, int64_t k, Scaling scaling,
                           DType out = DType::bf16) {
  OpDesc shape{m, n, k, DType::e4m3};
  shape.scaling = scaling;
  shape.out_dtype = out;
  return shape;
}

inline std::string describe_scaled(const OpDesc& s) {
  return fmt::format("M {} N {} K {} to {} by {}", s.m, s.n, s.k, tandem::name_of(s.out_dtype),
                     tandem::name_of(s.scaling));
}

constexpr Scaling kScalings[] = {Scaling::tensor, Scaling::row};

/// n, k: a rank's.
struct Shape3 {
  int64_t m, n, k;
};

}  // namespace tandem::test
