#include "tests/overlap/cuda/exact_product.h"

#include <cmath>

#include "bench/error_bound.h"
#include "core/cuda/check.h"
#include "core/cuda/element.cuh"
#include "core/cuda/fill.cuh"
#include "core/cuda/load_module.cuh"

namespace tandem::test {
namespace {

using namespace gpu;

constexpr int kTile = 32, kSide = 16, kEach = kTile / kSide;  // outputs and threads of a block
constexpr int kDepth = 32;

/// A block computes kTile x kTile outputs, a thread kEach x kEach. x: [terms, rows, k], w: [terms,
/// columns, k].
template <typename In>
__global__ void __launch_bounds__(kSide* kSide)
    exact_kernel(const In* x, const In* w, int64_t rows, int64_t columns, ProductReference ref,
                 DType out_dtype, AccumulationError lost, double* exact, double* bounds) {
  __shared__ double xs[kDepth][kTile + 1], ws[kDepth][kTile + 1];
  const int tx = int(threadIdx.x) % kSide, ty = int(threadIdx.x) / kSide;
  const int64_t first_row = int64_t(blockIdx.y) * kTile, first_column = int64_t(blockIdx.x) * kTile;
  double sum[kEach][kEach] = {};
  ErrorBound bound[kEach][kEach];
  for (int term = 0; term < ref.terms; ++term) {
    double dot[kEach][kEach] = {}, square[kEach][kEach] = {};
    for (int64_t begin = 0; begin < ref.k; begin += kDepth) {
      __syncthreads();
      for (int i = int(threadIdx.x); i < kTile * kDepth; i += kSide * kSide) {
        const int line = i / kDepth, depth = i % kDepth;
        const int64_t k = begin + depth, row = first_row + line, column = first_column + line;
        const bool in_k = k < ref.k;
        xs[depth][line] =
            in_k && row < rows ? double(to_float(x[(term * rows + row) * ref.k + k])) : 0;
        ws[depth][line] = in_k && column < columns
                              ? double(to_float(w[(term * columns + column) * ref.k + k]))
                              : 0;
      }
      __syncthreads();
      for (int depth = 0; depth < kDepth; ++depth) {
        double a[kEach], b[kEach];
        for (int i = 0; i < kEach; ++i) {
          a[i] = xs[depth][ty + i * kSide], b[i] = ws[depth][tx + i * kSide];
        }
        for (int i = 0; i < kEach; ++i) {
          for (int j = 0; j < kEach; ++j) {
            const double product = a[i] * b[j];
            dot[i][j] += product;
            square[i][j] += product * product;
          }
        }
      }
    }
    for (int i = 0; i < kEach; ++i) {
      for (int j = 0; j < kEach; ++j) {
        const int64_t row = first_row + ty + i * kSide, column = first_column + tx + j * kSide;
        const bool by_row = ref.scaling == Scaling::row;
        const double scale = ref.dtype != DType::e4m3
                                 ? 1
                                 : double(scale_value(ref.seed, ref.x_scales + uint64_t(term),
                                                      by_row ? ref.first_row + row : 0)) *
                                       double(scale_value(ref.seed, ref.w_scales + uint64_t(term),
                                                          by_row ? column : 0));
        sum[i][j] += scale * dot[i][j];
        bound[i][j].add_partial(scale * dot[i][j], scale * sqrt(square[i][j]), lost, out_dtype,
                                ref.terms > 1);
      }
    }
  }
  for (int i = 0; i < kEach; ++i) {
    for (int j = 0; j < kEach; ++j) {
      const int64_t row = first_row + ty + i * kSide, column = first_column + tx + j * kSide;
      if (row >= rows || column >= columns) continue;
      bound[i][j].round_running(ref.roundings - 1, out_dtype);
      bound[i][j].round(sum[i][j], out_dtype);
      exact[row * columns + column] = sum[i][j];
      bounds[row * columns + column] = bound[i][j].error();
    }
  }
}

struct Largest {
  unsigned long long of_bound, not_finite;  // bits of a non-negative double; a count
};

template <typename Out>
__global__ void compare_kernel(const Out* out, int64_t count, const double* exact,
                               const double* bounds, Largest* largest) {
  double of_bound = 0;
  unsigned long long not_finite = 0;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const double error = fabs(double(to_float(out[i])) - exact[i]);
    not_finite += !isfinite(error);
    of_bound = fmax(of_bound, isfinite(error) ? error / bounds[i] : double(INFINITY));
  }
  atomicMax(&largest->of_bound, __double_as_longlong(of_bound));
  if (not_finite > 0) atomicAdd(&largest->not_finite, not_finite);
}

/// Operand [terms, rows, k] of streams `stream` and the next ones.
DeviceMemory operand(const ProductReference& ref, uint64_t stream, int64_t rows, int64_t first_row,
                     cudaStream_t on) {
  const size_t bytes = size_t(rows * ref.k) * size_of(ref.dtype);
  DeviceMemory memory(size_t(ref.terms) * bytes);
  for (int term = 0; term < ref.terms; ++term) {
    const Tensor all(memory.data() + size_t(term) * bytes, ref.dtype, {rows, ref.k},
                     memory.view(ref.dtype, {1}).device());
    fill_uniform(all, ref.seed, stream + uint64_t(term), first_row * ref.k, on, ref.values);
  }
  return memory;
}

}  // namespace

ExactProduct::ExactProduct(const ProductReference& ref, int64_t rows, int64_t columns, DType out,
                           cudaStream_t on)
    : rows_(rows),
      columns_(columns),
      exact_(size_t(rows * columns) * sizeof(double)),
      bounds_(size_t(rows * columns) * sizeof(double)) {
  const DeviceMemory x = operand(ref, ref.x_stream, rows, ref.first_row, on),
                     w = operand(ref, ref.w_stream, columns, 0, on);
  const dim3 grid(unsigned((columns + kTile - 1) / kTile), unsigned((rows + kTile - 1) / kTile));
  with_storage_type(ref.dtype, [&]<typename In>(In) {
    exact_kernel<<<grid, kSide * kSide, 0, on>>>(
        reinterpret_cast<const In*>(x.data()), reinterpret_cast<const In*>(w.data()), rows, columns,
        ref, out, accumulation_error(ref.dtype, out, ref.k),
        reinterpret_cast<double*>(exact_.data()), reinterpret_cast<double*>(bounds_.data()));
  });
  check_launch("exact_kernel");
  check(cudaStreamSynchronize(on), "exact product");
}

Verdict ExactProduct::verify(const Tensor& out, cudaStream_t on) const {
  if (out.dim(0) != rows_ || out.dim(1) != columns_) {
    throw InvalidArgument("verify: out " + out.describe() + ": expected the product's shape");
  }
  const DeviceMemory memory(sizeof(Largest));
  with_float_type(out.dtype(), [&]<typename Out>(Out) {
    compare_kernel<<<1056, 256, 0, on>>>(
        out.as<const Out>(), out.elements(), reinterpret_cast<const double*>(exact_.data()),
        reinterpret_cast<const double*>(bounds_.data()), reinterpret_cast<Largest*>(memory.data()));
  });
  check_launch("compare_kernel");
  Largest largest{};
  // As in verify_product: a copy to pageable memory must not wait for a peer's kernel.
  check(cudaStreamSynchronize(on), "verify");
  check(cudaMemcpyAsync(&largest, memory.data(), sizeof largest, cudaMemcpyDefault, on), "verify");
  check(cudaStreamSynchronize(on), "verify");
  Verdict verdict;
  verdict.of_bound = std::bit_cast<double>(largest.of_bound);
  verdict.checked = out.elements();
  verdict.not_finite = int64_t(largest.not_finite);
  return verdict;
}

}  // namespace tandem::test
