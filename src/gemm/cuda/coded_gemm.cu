#include "gemm/cuda/coded_gemm.h"

#include <algorithm>
#include <cstdint>

#include "core/cuda/check.h"
#include "core/cuda/element.cuh"
#include "core/cuda/load_module.cuh"
#include "core/cuda/quantize_row.cuh"
#include "gemm/cuda/coded_kernels.h"
#include "gemm/cuda/coded_layout.h"
#include "gemm/cuda/rows_product.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMaxBlocks = 132 * 8;

struct CodedParams {
  uint32_t *codes, *scales;  // words
  int64_t rows, columns, steps, scale_columns;
};

/// Four values of a lane, its inputs of a step; 0 after the last input.
struct LaneValues {
  float of[4];
};

template <typename T>
struct alignas(4 * sizeof(T)) FourValues {
  T of[4];
};

/// Visits (row, step) with a warp.
template <typename Visit>
__device__ void for_each_step(const CodedParams& p, const Visit& visit) {
  const auto steps = unsigned(p.steps), total = unsigned(p.rows) * steps;  // 32-bit divisions
  for (unsigned i = blockIdx.x * kWarps + threadIdx.x / 32; i < total; i += gridDim.x * kWarps) {
    visit(int64_t(i / steps), int64_t(i % steps));
  }
}

__device__ uint32_t* lane_word(const CodedParams& p, int64_t row, int64_t step) {
  return p.codes + (row * p.steps + step) * kCodedWords + coded_word(int(threadIdx.x) % 32);
}

/// Max over `lanes` consecutive lanes, in each of them.
__device__ float lanes_max(float value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  }
  return value;
}

/// Bytes 0, 2, 1 and 3 of a word.
__device__ uint32_t coded_bytes(uint32_t first, uint32_t second, uint32_t third, uint32_t fourth) {
  return first | third << 8 | second << 16 | fourth << 24;
}
__device__ uint32_t byte_of(uint32_t word, int input) {
  constexpr int kShifts[4] = {0, 16, 8, 24};
  return word >> kShifts[input] & 0xffu;
}

/// Inputs of the pairs with the same number in two words, with the bytes of coded_bytes.
__device__ uint32_t pairs_of(uint32_t first, uint32_t second, int pair) {
  return __byte_perm(first, second, pair == 0 ? 0x6240 : 0x7351);
}
/// Makes a lane's word of four consecutive inputs one of the tensor cores' operand
/// (coded_layout.h), and back. Called by whole warps.
__device__ uint32_t to_operand(uint32_t word) {
  const int quad = int(threadIdx.x) % 32 / 4 * 4, lane = int(threadIdx.x) % 4;
  const uint32_t first = __shfl_sync(~0u, word, quad + lane / 2);
  const uint32_t second = __shfl_sync(~0u, word, quad + 2 + lane / 2);
  return pairs_of(first, second, lane % 2);
}
__device__ uint32_t from_operand(uint32_t word) {
  const int quad = int(threadIdx.x) % 32 / 4 * 4, lane = int(threadIdx.x) % 4;
  const uint32_t first = __shfl_sync(~0u, word, quad + lane % 2 * 2);
  const uint32_t second = __shfl_sync(~0u, word, quad + lane % 2 * 2 + 1);
  return pairs_of(first, second, lane / 2);
}

/// Codes and scales with the bits of gemm/cpu/coded_product.cc.
template <WeightFormat>
struct LaneCodes;

template <>
struct LaneCodes<WeightFormat::int8> {
  static constexpr int kLanesOfGroup = 16;

  __device__ static float scale_of(float maximum) {
    return __uint_as_float((__float_as_uint(__fdiv_rn(maximum, 127.0f)) + 0xffffu) & 0xffff0000u);
  }
  __device__ static uint32_t code(float weight, float scale) {
    if (scale == 0) return 0;
    const float rounded = rintf(__fdiv_rn(weight, scale));
    return uint32_t(int(fminf(fmaxf(rounded, -127.0f), 127.0f))) & 0xffu;
  }
  __device__ static uint32_t word(const LaneValues& v, float scale) {
    return coded_bytes(code(v.of[0], scale), code(v.of[1], scale), code(v.of[2], scale),
                       code(v.of[3], scale));
  }
  __device__ static float value(uint32_t byte) { return float(int8_t(byte)); }
  /// Word of a step's scales, of its first lane's group and the other.
  __device__ static uint32_t scales(float first, float second) {
    return __float_as_uint(first) >> 16 | (__float_as_uint(second) & 0xffff0000u);
  }
  __device__ static float scale(uint32_t word, int lane) {
    return __uint_as_float(lane < kLanesOfGroup ? word << 16 : word & 0xffff0000u);
  }
};

template <>
struct LaneCodes<WeightFormat::e4m3> {
  static constexpr int kLanesOfGroup = 32;

  __device__ static float scale_of(float maximum) { return row_scale(maximum); }
  __device__ static uint32_t word(const LaneValues& v, float scale) {
    const uint32_t low = code_pair(__fdiv_rn(v.of[0], scale), __fdiv_rn(v.of[1], scale));
    const uint32_t high = code_pair(__fdiv_rn(v.of[2], scale), __fdiv_rn(v.of[3], scale));
    return coded_bytes(low & 0xffu, low >> 8, high & 0xffu, high >> 8);
  }
  __device__ static float value(uint32_t byte) {
    __nv_fp8_e4m3 code;
    code.__x = uint8_t(byte);
    return to_float(code);
  }
  __device__ static uint32_t scales(float first, float) { return __float_as_uint(first); }
  __device__ static float scale(uint32_t word, int) { return __uint_as_float(word); }
};

template <WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const float* weight, const CodedParams p) {
  using Codes = LaneCodes<kFormat>;
  const int lane = int(threadIdx.x) % 32;
  for_each_step(p, [&](int64_t row, int64_t step) {
    const int64_t column = step * kCodedStep + lane * 4;
    LaneValues v;
    float maximum = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      v.of[e] = column + e < p.columns ? weight[row * p.columns + column + e] : 0.0f;
      maximum = fmaxf(maximum, fabsf(v.of[e]));
    }
    const float scale = Codes::scale_of(lanes_max(maximum, Codes::kLanesOfGroup));
    *lane_word(p, row, step) = to_operand(Codes::word(v, scale));
    const float second = __shfl_sync(~0u, scale, 16);
    if (lane == 0) p.scales[step * p.scale_columns + row] = Codes::scales(scale, second);
  });
}

template <WeightFormat kFormat, typename Out>
__global__ void __launch_bounds__(kThreads) read_kernel(const CodedParams p, Out* to) {
  using Codes = LaneCodes<kFormat>;
  const int lane = int(threadIdx.x) % 32;
  for_each_step(p, [&](int64_t row, int64_t step) {
    const int64_t column = step * kCodedStep + lane * 4;
    const float scale = Codes::scale(p.scales[step * p.scale_columns + row], lane);
    const uint32_t word = from_operand(*lane_word(p, row, step));
    FourValues<Out> values;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      values.of[e] = from_float<Out>(scale * Codes::value(byte_of(word, e)));
    }
    Out* const out = to + row * p.columns + column;
    if (p.columns % 4 == 0) {
      if (column < p.columns) *reinterpret_cast<FourValues<Out>*>(out) = values;
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (column + e < p.columns) out[e] = values.of[e];
    }
  });
}

CodedParams make_params(const CodedMatrix& matrix) {
  if (matrix.rows * matrix.scales.dim(0) > INT32_MAX) {
    throw InvalidArgument("coded weights of " + matrix.codes.describe() +
                          ": expected fewer than 2^31 x 128 codes on a GPU");
  }
  return {matrix.codes.as<uint32_t>(), matrix.scales.as<uint32_t>(), matrix.rows, matrix.columns,
          matrix.scales.dim(0),        matrix.scales.dim(1)};
}

unsigned blocks_for(const CodedParams& p) {
  return unsigned(std::min<int64_t>((p.rows * p.steps + kWarps - 1) / kWarps, kMaxBlocks));
}

template <typename Out>
void launch_read(cudaStream_t stream, const CodedMatrix& weight, const Tensor& to) {
  const auto kernel = weight.format == WeightFormat::int8 ? read_kernel<WeightFormat::int8, Out>
                                                          : read_kernel<WeightFormat::e4m3, Out>;
  const CodedParams params = make_params(weight);
  kernel<<<blocks_for(params), kThreads, 0, stream>>>(params, to.as<Out>());
  check_launch("read of coded weights");
}

bool has_vectors(const Tensor& rows) {
  return reinterpret_cast<uintptr_t>(rows.data()) % 16 == 0 &&
         (rows.dim(0) == 1 || rows.stride(0) % 8 == 0);
}

}  // namespace

CodedShape coded_shape(int64_t rows, int64_t columns) {
  const int64_t steps = coded_steps(columns);
  return {steps * kCodedStep, steps, (rows + 3) / 4 * 4};
}

bool has_coded_gemm() {
  return has_rows_product();
}

void quantize(cudaStream_t stream, const Tensor& weight, const CodedMatrix& to) {
  const CodedParams params = make_params(to);
  if (params.rows * params.steps == 0) return;
  const auto kernel = to.format == WeightFormat::int8 ? quantize_kernel<WeightFormat::int8>
                                                      : quantize_kernel<WeightFormat::e4m3>;
  kernel<<<blocks_for(params), kThreads, 0, stream>>>(weight.as<const float>(), params);
  check_launch("quantize of coded weights");
}

void read(cudaStream_t stream, const CodedMatrix& weight, const Tensor& to) {
  if (weight.rows * weight.columns == 0) return;
  to.dtype() == DType::f32 ? launch_read<float>(stream, weight, to)
                           : launch_read<__nv_bfloat16>(stream, weight, to);
}

bool is_coded_gemm(const CodedMatrix& weight, const Tensor& x, const Tensor& out) {
  const auto has_rows = [](const Tensor& t) {
    return t.stride(1) == 1 && (t.dim(0) == 1 || t.stride(0) >= t.dim(1));
  };
  return x.dtype() == DType::bf16 && (out.dtype() == DType::bf16 || out.dtype() == DType::f32) &&
         x.dim(0) <= kMaxFewRows && weight.columns > 0 && out.dim(1) > 0 && has_rows(x) &&
         has_vectors(x) && has_rows(out);
}

void coded_gemm(cudaStream_t stream, const CodedMatrix& weight, const Tensor& x, const Tensor& out,
                const CodedGemmOptions& options) {
  weight.format == WeightFormat::int8 ? launch_int8_gemm(stream, weight, x, out, options)
                                      : launch_e4m3_gemm(stream, weight, x, out, options);
}

}  // namespace tandem::gpu
