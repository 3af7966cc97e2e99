#include <cmath>

#include "bench/cuda/verify.h"
#include "bench/error_bound.h"
#include "core/cuda/element.cuh"
#include "core/cuda/fill.cuh"
#include "core/cuda/handles.h"
#include "core/cuda/load_module.cuh"
#include "gemm/cuda/scale.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;
static_assert(kPromotionK <= kLatestPromotionK, "the bound of e4m3 products is for that");

__device__ double block_sum(double value) {
  __shared__ double partial[kThreads / 32];
  for (int offset = 16; offset; offset /= 2) value += __shfl_down_sync(~0u, value, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < kThreads / 32; ++w) sum += partial[w];
  return sum;
}

struct Tally {
  unsigned long long max_rel, of_bound;  // bits of non-negative doubles: ordered as integers
  unsigned long long not_finite, digest;
};

// Element of x or of the weight, rounded to the operands' dtype.
template <typename In>
__device__ float operand_value(const ProductReference& ref, uint64_t stream, int64_t index) {
  const float value = to_float(from_float<In>(uniform_value(ref.seed, stream, index)));
  return ref.values == Values::positive ? fabsf(value) : value;
}

// Non-finite errors exceed any bound.
__device__ double share_of(double error, double bound) {
  return isfinite(error) ? error / bound : INFINITY;
}

// Combined scale of one term at (row, column).
__device__ double scale_at(const ProductReference& ref, int term, int64_t row, int64_t column) {
  if (ref.dtype != DType::e4m3) return 1;
  const bool by_row = ref.scaling == Scaling::row;
  return double(scale_value(ref.seed, ref.x_scales + uint64_t(term),
                            by_row ? ref.first_row + row : 0)) *
         double(scale_value(ref.seed, ref.w_scales + uint64_t(term), by_row ? column : 0));
}

template <typename In, typename Out>
__global__ void sample_kernel(const Out* out, DType out_dtype, int64_t rows, int64_t columns,
                              ProductReference ref, int64_t samples, AccumulationError lost,
                              Tally* tally) {
  const int64_t total = rows * columns;
  for (int64_t s = blockIdx.x; s < samples; s += gridDim.x) {
    // A stride coprime to any realistic size spreads the samples over rows and columns.
    const int64_t at =
        samples == total ? s : int64_t((unsigned __int128)(s * 2654435761ll) % total);
    const int64_t row = at / columns, column = at % columns;
    double exact = 0, squares = 0;
    ErrorBound bound;
    for (int term = 0; term < ref.terms; ++term) {
      double dot = 0, square = 0;
      for (int64_t k = threadIdx.x; k < ref.k; k += kThreads) {
        const int64_t of_x = ref.x_is_km ? k * rows + row : (ref.first_row + row) * ref.k + k;
        const int64_t of_w = ref.w_is_kn ? k * columns + column : column * ref.k + k;
        const float x = operand_value<In>(ref, ref.x_stream + uint64_t(term), of_x);
        const float w = operand_value<In>(ref, ref.w_stream + uint64_t(term), of_w);
        dot += double(x) * double(w);
        square += double(x) * double(x) * double(w) * double(w);
      }
      const double scale = scale_at(ref, term, row, column);
      dot = scale * block_sum(dot);
      square = scale * scale * block_sum(square);
      squares += square;
      exact += dot;
      bound.add_partial(dot, sqrt(square), lost, out_dtype, ref.terms > 1);
    }
    if (threadIdx.x != 0) continue;
    bound.round_running(ref.roundings - 1, out_dtype);
    if (ref.residual_stream != 0) {
      if (ref.sum_is_rounded) bound.round(exact, out_dtype);
      exact += to_float(from_float<Out>(uniform_value(ref.seed, ref.residual_stream, at)));
    }
    const double typical = sqrt(squares) + 1e-30;
    const double error = fabs(double(to_float(out[at])) - exact);
    bound.round(exact, out_dtype);
    atomicMax(&tally->of_bound, __double_as_longlong(share_of(error, bound.error())));
    if (!isfinite(error)) continue;
    const double rel = error / fmax(fabs(exact), typical);
    atomicMax(&tally->max_rel, __double_as_longlong(rel));
  }
}

template <typename T>
__global__ void sum_check_kernel(const T* out, int64_t count, uint64_t seed, uint64_t x_stream,
                                 int terms, DType dtype, Tally* tally) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  double max_rel = 0, max_of_bound = 0;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    double exact = 0, sizes = 0;
    for (int r = 0; r < terms; ++r) {
      const double x = to_float(from_float<T>(uniform_value(seed, x_stream + uint64_t(r), i)));
      exact += x;
      sizes += fabs(x);
    }
    const double error = fabs(double(to_float(out[i])) - exact);
    const double lost = terms * 0x1p-24 * sizes;  // rounding of f32 additions
    const double bound = half_ulp(fabs(exact) + lost, dtype) + lost;
    max_of_bound = fmax(max_of_bound, share_of(error, bound));
    if (isfinite(error)) max_rel = fmax(max_rel, error / fmax(fabs(exact), 1.0));
  }
  atomicMax(&tally->max_rel, __double_as_longlong(max_rel));
  atomicMax(&tally->of_bound, __double_as_longlong(max_of_bound));
}

// One block per row; the sum of squares is in f64.
template <typename T>
__global__ void norm_check_kernel(const T* out, const T* hidden, const T* gain, int64_t columns,
                                  float eps, DType dtype, Tally* tally) {
  hidden += int64_t(blockIdx.x) * columns;
  out += int64_t(blockIdx.x) * columns;
  double squares = 0;
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    squares += double(to_float(hidden[i])) * double(to_float(hidden[i]));
  }
  const double scale = 1 / sqrt(block_sum(squares) / double(columns) + double(eps));
  // A thread adds at most columns / 512 squares to each of its sums, followed by 21 additions; the
  // root halves their error. Then five single operations.
  const double lost = (double(columns) / 1024 + 32) * 0x1p-24;
  double max_rel = 0, max_of_bound = 0;
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    const double exact = double(to_float(hidden[i])) * scale * double(to_float(gain[i]));
    const double error = fabs(double(to_float(out[i])) - exact);
    const double bound = half_ulp(fabs(exact) * (1 + lost), dtype) + fabs(exact) * lost;
    max_of_bound = fmax(max_of_bound, share_of(error, bound));
    if (isfinite(error)) max_rel = fmax(max_rel, error / fmax(fabs(exact), 1.0));
  }
  atomicMax(&tally->max_rel, __double_as_longlong(max_rel));
  atomicMax(&tally->of_bound, __double_as_longlong(max_of_bound));
}

template <typename T>
__global__ void scan_kernel(const T* out, int64_t count, unsigned long long* not_finite,
                            unsigned long long* digest) {
  unsigned long long bad = 0, mixed = 0;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const float value = to_float(out[i]);
    bad += !isfinite(value);
    unsigned long long word = (unsigned long long)(__float_as_uint(value)) +
                              0x9e3779b97f4a7c15ull * (unsigned long long)(i + 1);
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ull;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebull;
    mixed += word ^ (word >> 31);
  }
  if (bad && not_finite) atomicAdd(not_finite, bad);
  atomicAdd(digest, mixed);
}

void require_float(bool known, const Tensor& tensor) {
  if (!known) throw InvalidArgument("dtype of " + tensor.describe() + ": expected a float type");
}

Tally read(const DeviceMemory& memory, cudaStream_t on) {
  Tally tally{};
  // A copy to pageable memory waits under the context's lock: if ranks share a GPU, waiting for a
  // peer's kernel would keep the peer from launching it.
  check(cudaStreamSynchronize(on), "verify");
  check(cudaMemcpyAsync(&tally, memory.data(), sizeof tally, cudaMemcpyDefault, on), "read tally");
  check(cudaStreamSynchronize(on), "verify");
  return tally;
}

void scan(const Tensor& tensor, unsigned long long* not_finite, unsigned long long* digest,
          cudaStream_t on) {
  if (tensor.elements() == 0) return;
  require_float(with_storage_type(tensor.dtype(),
                                  [&]<typename T>(T) {
                                    scan_kernel<<<528, kThreads, 0, on>>>(tensor.as<const T>(),
                                                                          tensor.elements(),
                                                                          not_finite, digest);
                                  }),
                tensor);
  check_launch("scan_kernel");
}

void scan(const Tensor& tensor, Tally* tally, cudaStream_t on) {
  scan(tensor, &tally->not_finite, &tally->digest, on);
}

void keep(const Tally& tally, Verdict& verdict) {
  verdict.max_rel = std::bit_cast<double>(tally.max_rel);
  verdict.of_bound = tally.not_finite > 0 ? INFINITY : std::bit_cast<double>(tally.of_bound);
  verdict.not_finite = int64_t(tally.not_finite);
  verdict.digest = tally.digest;
}

template <typename In, typename Out>
void sample(const Tensor& out, const ProductReference& reference, int64_t samples, Tally* tally,
            cudaStream_t on) {
  sample_kernel<In, Out><<<1056, kThreads, 0, on>>>(
      out.as<const Out>(), out.dtype(), out.dim(0), out.dim(1), reference, samples,
      accumulation_error(reference.dtype, out.dtype(), reference.k), tally);
}

}  // namespace

Verdict verify_product(const Tensor& out, const ProductReference& reference, int64_t samples,
                       cudaStream_t on) {
  Verdict verdict;
  if (out.elements() == 0) return verdict;
  const DeviceMemory memory(sizeof(Tally));
  auto* tally = reinterpret_cast<Tally*>(memory.data());
  verdict.checked = std::min(samples, out.elements());
  bool known = false;
  require_float(with_float_type(out.dtype(),
                                [&]<typename T>(T) {
                                  known = with_storage_type(reference.dtype, [&]<typename In>(In) {
                                    sample<In, T>(out, reference, verdict.checked, tally, on);
                                  });
                                }),
                out);
  if (!known) {
    throw InvalidArgument("verify_product: operands of dtype " +
                          std::string(name_of(reference.dtype)) + ": expected a float type");
  }
  check_launch("sample_kernel");
  scan(out, tally, on);
  keep(read(memory, on), verdict);
  return verdict;
}

namespace {

// Element-wise check: `launch` enqueues the kernel for out's type.
template <typename Launch>
Verdict check_all(const Tensor& out, const char* kernel, cudaStream_t on, const Launch& launch) {
  Verdict verdict;
  if (out.elements() == 0) return verdict;
  const DeviceMemory memory(sizeof(Tally));
  auto* tally = reinterpret_cast<Tally*>(memory.data());
  verdict.checked = out.elements();
  require_float(
      with_float_type(out.dtype(), [&]<typename T>(T) { launch.template operator()<T>(tally); }),
      out);
  check_launch(kernel);
  scan(out, tally, on);
  keep(read(memory, on), verdict);
  return verdict;
}

}  // namespace

Verdict verify_sum(const Tensor& out, uint64_t seed, uint64_t x_stream, int terms,
                   cudaStream_t on) {
  return check_all(out, "sum_check_kernel", on, [&]<typename T>(Tally* tally) {
    sum_check_kernel<<<1056, kThreads, 0, on>>>(out.as<const T>(), out.elements(), seed, x_stream,
                                                terms, out.dtype(), tally);
  });
}

Verdict verify_norm(const Tensor& out, const Tensor& hidden, const Tensor& gain, float eps,
                    cudaStream_t on) {
  return check_all(out, "norm_check_kernel", on, [&]<typename T>(Tally* tally) {
    norm_check_kernel<<<unsigned(out.dim(0)), kThreads, 0, on>>>(
        out.as<const T>(), hidden.as<const T>(), gain.as<const T>(), out.dim(1), eps, out.dtype(),
        tally);
  });
}

uint64_t digest(const Tensor& tensor, cudaStream_t on) {
  const DeviceMemory memory(sizeof(Tally));
  scan(tensor, reinterpret_cast<Tally*>(memory.data()), on);
  return read(memory, on).digest;
}

void enqueue_digest(const Tensor& tensor, uint64_t* sum, cudaStream_t on) {
  check(cudaMemsetAsync(sum, 0, sizeof *sum, on), "clear a digest");
  scan(tensor, nullptr, reinterpret_cast<unsigned long long*>(sum), on);
}

}  // namespace tandem::gpu
