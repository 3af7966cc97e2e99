#include "codec/cuda/encode.h"

#include <string>

#include "codec/cuda/block.cuh"
#include "codec/cuda/grid.h"
#include "codec/whole.h"
#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

// Thread blocks per SM, limited by registers.
template <typename Block>
constexpr int kEncodersPerSm = Block::transform == Transform::spikes                         ? 2
                               : Block::transform == Transform::rotation || Block::kCentered ? 3
                                                                                             : 4;
template <typename Block>
constexpr int kDecodersPerSm = Block::transform == Transform::none ? 4 : 3;

template <typename Block>
__global__ void __launch_bounds__(kCodecThreads, kEncodersPerSm<Block>)
    encode_kernel(const __grid_constant__ WireParams wire, const void* values, DType dtype,
                  int64_t elements, std::byte* message) {
  if (blockIdx.x == 0 && threadIdx.x < 32) clear_between(wire, message, int(threadIdx.x));
  for_blocks(wire.layout.blocks, [&](int64_t block, int lane, bool on) {
    float x[kLaneValues];
    load_elements(values, dtype, elements, block, lane, on, x);
    Block encoded;
    encoded.encode(wire, x, lane);
    encoded.store(wire, message, block, lane, on);
  });
}

template <typename Block>
__global__ void __launch_bounds__(kCodecThreads, kDecodersPerSm<Block>)
    decode_kernel(const __grid_constant__ WireParams wire, const std::byte* message, void* values,
                  DType dtype, int64_t elements) {
  for_blocks(wire.layout.blocks, [&](int64_t block, int lane, bool on) {
    Block encoded;
    encoded.load(wire, message, block, lane);
    float x[kLaneValues];
    encoded.decode(wire, lane, x);
    store_elements(values, dtype, elements, block, lane, on, x);
  });
}

}  // namespace

void check_message(const char* op, const Wire& wire, const Tensor& values,
                   const std::byte* message) {
  codec::require_encodable(wire, values.dtype());
  if (wire.codec != Codec::lossless) require_encodable_on_gpu(op, wire, values.dtype());
  if (!values.contiguous() || values.device().kind != DeviceKind::cuda) {
    throw InvalidArgument(std::string(op) + ": values " + values.describe() +
                          ": expected a contiguous tensor on a GPU");
  }
  if (reinterpret_cast<uintptr_t>(message) % 16 != 0) {
    throw InvalidArgument(std::string(op) + ": message: expected it at a multiple of 16 bytes");
  }
}

void require_encodable_on_gpu(const char* op, const Wire& wire, DType dtype) {
  codec::require_encodable(wire, dtype);
  if (codec::is_grouped(wire.codec)) return;
  throw Unsupported(std::string(op) + ": codec " + wire.describe() +
                    ": expected one with groups on GPUs: int8 to int2, e4m3, e5m2, mxfp8, mxfp6 or "
                    "mxfp4");
}

void launch_encode(const Wire& wire, const Tensor& values, std::byte* message,
                   cudaStream_t stream) {
  check_message("encode", wire, values, message);
  if (values.elements() == 0) return;
  if (wire.codec == Codec::lossless) return launch_encode_lossless(values, message, stream);
  const WireParams params = WireParams::of(wire, values.elements(), values.dtype());
  with_block(wire, [&]<typename Block>() {
    const unsigned grid = codec_grid(params.layout.blocks, kEncodersPerSm<Block>);
    encode_kernel<Block><<<grid, kCodecThreads, 0, stream>>>(params, values.data(), values.dtype(),
                                                             values.elements(), message);
  });
  check_launch("encode_kernel");
}

void launch_decode(const Wire& wire, const std::byte* message, const Tensor& values,
                   cudaStream_t stream) {
  check_message("decode", wire, values, message);
  if (values.elements() == 0) return;
  if (wire.codec == Codec::lossless) return launch_decode_lossless(message, values, stream);
  const WireParams params = WireParams::of(wire, values.elements(), values.dtype());
  with_block(wire, [&]<typename Block>() {
    const unsigned grid = codec_grid(params.layout.blocks, kDecodersPerSm<Block>);
    decode_kernel<Block><<<grid, kCodecThreads, 0, stream>>>(params, message, values.data(),
                                                             values.dtype(), values.elements());
  });
  check_launch("decode_kernel");
}

}  // namespace tandem::gpu
