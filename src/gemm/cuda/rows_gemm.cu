// On Hopper launches rows_product.cuh's kernel, for one or two rows of short k and on other GPUs
// this one.
//
// A block computes 16 columns of the result, the rows of one tile of the weight, for all rows of a:
// its warps divide k, and their sums are added in order. Each warp has a ring of its own in shared
// memory, so that many bytes of the weight are under way and no warp waits for another. The
// products' order within k is that in which lanes read 16 bytes, the same for both operands.
//
// With SwiGLU a block computes 8 columns: half of its rows of the weight are of the gate, the other
// half those of up for the same columns.
#include "gemm/cuda/rows_gemm.h"

#include <algorithm>

#include "core/cuda/early_start.cuh"
#include "core/cuda/element.cuh"
#include "core/cuda/load_module.cuh"
#include "core/cuda/multiply_tile.cuh"
#include "core/cuda/silu.cuh"
#include "gemm/cuda/rows_product.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr int kTileRows = 16;    // of the weight
constexpr int kTileColumns = 8;  // rows of a
constexpr int kStep = 64;        // of k: 128 bytes of a row
constexpr int64_t kMaxRows = 2 * kTileColumns;
constexpr int64_t kMaxRowsOnHopper = 2;  // the other kernel is slower for so few, if k is short
constexpr int kWarpsOfBlock = 4;
constexpr int kRowsThreads = kWarpsOfBlock * 32;
constexpr int kStages = 8;
constexpr int kChunksOfStage = kTileRows * kStep * 2 / 16;
constexpr int kRowsBytes = kWarpsOfBlock * kStages * kChunksOfStage * 16;

struct RowsParams {
  const __nv_bfloat16 *a, *weight;
  void* out;
  int64_t a_stride, out_stride;
  int m, n, k;  // n: columns of out
  bool accumulate;
};

__device__ void copy_chunk(uint4* to, const __nv_bfloat16* from) {
  const auto shared = unsigned(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(from));
}
/// Chunk c of 16 bytes of a row: lanes that read together, of two rows, are in all banks.
__device__ uint4* chunk_at(uint4* stage, int row, int c) {
  return stage + row * (kStep / 8) + (c ^ (row % 2 * 4));
}

/// kTiles: of kTileColumns rows of a.
template <typename Out, int kTiles, bool kSwiglu>
__global__ void __launch_bounds__(kRowsThreads) rows_gemm_kernel(const RowsParams p) {
  constexpr int kColumnsOfBlock = kSwiglu ? kTileRows / 2 : kTileRows;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int first_n = int(blockIdx.x) * kColumnsOfBlock, steps = p.k / kStep;
  // Rows past the end are computed and not stored.
  const auto weight_row = [&](int row) {
    return row / kColumnsOfBlock * p.n + min(first_n + row % kColumnsOfBlock, p.n - 1);
  };
  const int begin = steps * warp / kWarpsOfBlock, end = steps * (warp + 1) / kWarpsOfBlock;
  extern __shared__ uint4 rows_memory[];
  uint4* const ring = rows_memory + warp * kStages * kChunksOfStage;
  const auto load = [&](int step) {
    if (step < end) {
#pragma unroll
      for (int i = 0; i < kChunksOfStage / 32; ++i) {
        const int row = i * 4 + lane / 8, c = lane % 8;
        copy_chunk(chunk_at(ring + step % kStages * kChunksOfStage, row, c),
                   p.weight + int64_t(weight_row(row)) * p.k + step * kStep + c * 8);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load(begin + i);
  let_next_start();
  wait_for_previous();

  float sum[kTiles][4] = {};
  uint4 x[kTiles][2], next_x[kTiles][2];
  const auto load_x = [&](uint4(&to)[kTiles][2], int step) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int row = t * kTileColumns + lane / 4;
      const __nv_bfloat16* const from = p.a + row * p.a_stride + step * kStep + lane % 4 * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to[t][half] =
            row < p.m && step < end ? *reinterpret_cast<const uint4*>(from + half * 32) : uint4{};
      }
    }
  };
  load_x(next_x, begin);
#pragma unroll 2
  for (int step = begin; step < end; ++step) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) x[t][0] = next_x[t][0], x[t][1] = next_x[t][1];
    load_x(next_x, step + 1);
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
    __syncwarp();  // all lanes' copies of this stage, and reads of the one that is loaded next
    load(step + kStages - 1);
    uint4* const stage = ring + step % kStages * kChunksOfStage;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 w = *chunk_at(stage, lane / 4, half * 4 + lane % 4);
      const uint4 v = *chunk_at(stage, lane / 4 + 8, half * 4 + lane % 4);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        multiply_tile(sum[t], {w.x, v.x, w.y, v.y}, {x[t][half].x, x[t][half].y});
        multiply_tile(sum[t], {w.z, v.z, w.w, v.w}, {x[t][half].z, x[t][half].w});
      }
    }
  }

  __shared__ float sums[kWarpsOfBlock][kTiles * kTileColumns][kTileRows];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sums[warp][t * kTileColumns + lane % 4 * 2 + e % 2][lane / 4 + e / 2 * 8] = sum[t][e];
    }
  }
  __syncthreads();
  const auto sum_of = [&](int row, int column) {
    float result = 0;
#pragma unroll
    for (int w = 0; w < kWarpsOfBlock; ++w) result += sums[w][row][column];
    return result;
  };
  for (int i = int(threadIdx.x); i < p.m * kColumnsOfBlock; i += kRowsThreads) {
    const int row = i / kColumnsOfBlock, column = i % kColumnsOfBlock;
    if (first_n + column >= p.n) continue;
    float result = sum_of(row, column);
    Out& out = static_cast<Out*>(p.out)[row * p.out_stride + first_n + column];
    if constexpr (kSwiglu) {
      const float gate = to_float(from_float<Out>(result));
      const float up = to_float(from_float<Out>(sum_of(row, column + kColumnsOfBlock)));
      result = gate * sigmoid(gate) * up;
    } else if (p.accumulate) {
      result += to_float(out);
    }
    out = from_float<Out>(result);
  }
}

template <typename Out, bool kSwiglu = false>
void launch(const RowsParams& p, bool early, cudaStream_t stream) {
  constexpr int kColumnsOfBlock = kSwiglu ? kTileRows / 2 : kTileRows;
  const dim3 grid(unsigned((p.n - 1) / kColumnsOfBlock + 1));
  const auto kernel =
      p.m <= kTileColumns ? rows_gemm_kernel<Out, 1, kSwiglu> : rows_gemm_kernel<Out, 2, kSwiglu>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRowsBytes),
        "rows_gemm");
  launch_early("rows_gemm", kernel, grid, kRowsThreads, kRowsBytes, stream, early, p);
}

bool has_rows(const Tensor& tensor, int64_t unit) {
  return tensor.dims() == 2 && tensor.stride(1) == 1 && tensor.stride(0) % unit == 0 &&
         (tensor.dim(0) == 1 || tensor.stride(0) >= tensor.dim(1));
}

bool has_vectors(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0;
}

void check_operands(const Tensor& a, const Tensor& weight, const Tensor& out, int64_t columns) {
  if (is_rows_gemm(a, weight, out) && out.dim(0) == a.dim(0) && out.dim(1) == columns) return;
  throw InvalidArgument(
      "rows_gemm: a " + a.describe() + ", weight " + weight.describe() + ", out " + out.describe() +
      ": expected few rows of bf16 at multiples of 16 bytes, and k in multiples of 64");
}

RowsParams make_params(const Tensor& a, const Tensor& weight, const Tensor& out, bool accumulate) {
  return {.a = a.as<__nv_bfloat16>(),
          .weight = weight.as<__nv_bfloat16>(),
          .out = out.data(),
          .a_stride = a.stride(0),
          .out_stride = out.stride(0),
          .m = int(a.dim(0)),
          .n = int(out.dim(1)),
          .k = int(a.dim(1)),
          .accumulate = accumulate};
}

/// Whether rows_product.cuh's kernel runs. k = 0: only the kernel of this file.
bool is_product(const Tensor& a, const Tensor& weight, bool same_bits) {
  const int64_t k = a.dim(1);
  return k > 0 && (same_bits || a.dim(0) > kMaxRowsOnHopper || k > 2 * weight.dim(0)) &&
         has_rows_product();
}

}  // namespace

int64_t max_gemm_rows() {
  return has_rows_product() ? kMaxFewRows : kMaxRows;
}

bool is_rows_gemm(const Tensor& a, const Tensor& weight, const Tensor& out) {
  return a.dtype() == DType::bf16 && weight.dtype() == DType::bf16 &&
         (out.dtype() == DType::bf16 || out.dtype() == DType::f32) && has_rows(a, 8) &&
         has_rows(out, 1) && weight.dims() == 2 && weight.contiguous() && a.dim(0) > 0 &&
         a.dim(0) <= (a.dim(1) > 0 ? max_gemm_rows() : kMaxRows) && a.dim(1) == weight.dim(1) &&
         a.dim(1) % kStep == 0 && weight.dim(0) > 0 && has_vectors(a) && has_vectors(weight);
}

void rows_gemm(cudaStream_t stream, const Tensor& a, const Tensor& weight, const Tensor& out,
               const RowsGemmOptions& options) {
  check_operands(a, weight, out, weight.dim(0));
  if (is_product(a, weight, options.same_bits)) {
    return launch_rows_product(stream, {.a = a,
                                        .weight = weight,
                                        .out = out,
                                        .accumulate = options.accumulate,
                                        .early = options.early});
  }
  const RowsParams params = make_params(a, weight, out, options.accumulate);
  out.dtype() == DType::f32 ? launch<float>(params, options.early, stream)
                            : launch<__nv_bfloat16>(params, options.early, stream);
}

void rows_gemm_swiglu(cudaStream_t stream, const Tensor& a, const Tensor& weight, const Tensor& out,
                      bool same_bits) {
  check_operands(a, weight, out, weight.dim(0) / 2);
  if (weight.dim(0) % 2 != 0) {
    throw InvalidArgument("rows_gemm: SwiGLU of " + weight.describe() +
                          ": expected an even number of rows");
  }
  if (out.dtype() != DType::bf16) {
    throw InvalidArgument("rows_gemm: SwiGLU to " + out.describe() + ": expected bf16");
  }
  if (is_product(a, weight, same_bits)) {
    return launch_rows_product(
        stream, {.a = a, .weight = weight, .out = out, .early = true, .swiglu = true});
  }
  launch<__nv_bfloat16, true>(make_params(a, weight, out, false), true, stream);
}

}  // namespace tandem::gpu
