#include <algorithm>

#include "codec/cuda/encode.h"
#include "codec/cuda/lossless.cuh"
#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "core/cuda/share.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ int64_t warp_number() {
  return int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
}
__device__ bool is_coded(const std::byte* message) {
  return __ldcg(reinterpret_cast<const uint32_t*>(message)) != 0;
}

__global__ void __launch_bounds__(kThreads, 4)
    encode_tiles_kernel(const __grid_constant__ LosslessParams params, const void* values,
                        std::byte* message) {
  if (blockIdx.x == 0 && threadIdx.x < 32) clear_between(params, message, int(threadIdx.x));
  if (warp_number() < params.tiles) {
    encode_tile(params, values, warp_number(), int(threadIdx.x) % 32, message);
  }
}

__global__ void sum_escapes_kernel(const __grid_constant__ LosslessParams params,
                                   std::byte* message) {
  sum_escapes(params, blockIdx.x, int(threadIdx.x), message);
}

// Copies bytes, 16 at a time if both pointers are aligned.
__device__ void copy_elements(const std::byte* from, std::byte* to, int64_t bytes) {
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  const bool wide = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  const int64_t num_vecs = wide ? bytes / 16 : 0;
  for (int64_t i = first; i < num_vecs; i += step) {
    reinterpret_cast<uint4*>(to)[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
  }
  for (int64_t i = 16 * num_vecs / 2 + first; i < bytes / 2; i += step) {
    reinterpret_cast<uint16_t*>(to)[i] = __ldcg(reinterpret_cast<const uint16_t*>(from) + i);
  }
}

__global__ void __launch_bounds__(kThreads)
    finish_encoding_kernel(const __grid_constant__ LosslessParams params, const void* values,
                           std::byte* message) {
  if (!is_coded(message)) {
    return copy_elements(static_cast<const std::byte*>(values), message + 16,
                         params.elements * (params.dtype == DType::f32 ? 4 : 2));
  }
  for (int64_t begin = 32 * warp_number(); begin < params.groups;
       begin += 32 * kWarps * int64_t(gridDim.x)) {
    write_escapes(params, values, begin, int(threadIdx.x) % 32, message);
  }
}

__global__ void __launch_bounds__(kThreads, 4)
    decode_lossless_kernel(const __grid_constant__ LosslessParams params, const std::byte* message,
                           void* values) {
  if (!is_coded(message)) {
    return copy_elements(message + 16, static_cast<std::byte*>(values),
                         params.elements * (params.dtype == DType::f32 ? 4 : 2));
  }
  constexpr int64_t kBlocks = 32 * codec::kLosslessGroup / kWireBlock;  // blocks in 32 groups
  const int lane = int(threadIdx.x) % 32;
  for (int64_t begin = kBlocks * warp_number(); begin < params.blocks;
       begin += kBlocks * kWarps * int64_t(gridDim.x)) {
    const int64_t end = min(begin + kBlocks, params.blocks);
    for (int64_t block = begin; block < end; block += 32 / kQuad) {
      decode_blocks(params, message, block, lane, values);
    }
    __syncwarp();
    decode_escapes(params, message, begin * kWireBlock / codec::kLosslessGroup, lane, values);
  }
}

unsigned warps_grid(int64_t warps, int per_sm) {
  const int64_t all = (warps + kWarps - 1) / kWarps;
  return unsigned(std::clamp<int64_t>(all, 1, int64_t(this_share()->sms()) * per_sm));
}

void copy_all(void* to, const void* from, const Tensor& values, cudaStream_t stream) {
  const size_t bytes = size_t(values.elements()) * size_of(values.dtype());
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "copy a short message");
}

}  // namespace

void launch_encode_lossless(const Tensor& values, std::byte* message, cudaStream_t stream) {
  if (values.elements() < codec::kMinCoded) {
    return copy_all(message, values.data(), values, stream);
  }
  const LosslessParams params = LosslessParams::of(values.elements(), values.dtype());
  const auto tiles = unsigned((params.tiles + kWarps - 1) / kWarps);
  encode_tiles_kernel<<<tiles, kThreads, 0, stream>>>(params, values.data(), message);
  check_launch("encode_tiles_kernel");
  const auto scan_blocks = unsigned((params.groups + kScanGroups - 1) / kScanGroups);
  sum_escapes_kernel<<<scan_blocks, 32, 0, stream>>>(params, message);
  check_launch("sum_escapes_kernel");
  finish_encoding_kernel<<<warps_grid((params.groups + 31) / 32, 8), kThreads, 0, stream>>>(
      params, values.data(), message);
  check_launch("finish_encoding_kernel");
}

void launch_decode_lossless(const std::byte* message, const Tensor& values, cudaStream_t stream) {
  if (values.elements() < codec::kMinCoded) {
    return copy_all(values.data(), message, values, stream);
  }
  const LosslessParams params = LosslessParams::of(values.elements(), values.dtype());
  decode_lossless_kernel<<<warps_grid((params.groups + 31) / 32, 4), kThreads, 0, stream>>>(
      params, message, values.data());
  check_launch("decode_lossless_kernel");
}

}  // namespace tandem::gpu
