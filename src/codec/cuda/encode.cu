#include "codec/cuda/encode.h"

#include <algorithm>
#include <string>

#include "codec/cuda/block.cuh"
#include "codec/whole.h"
#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "core/cuda/share.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;

template <typename Format>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(WireJob wire, const void* values, DType dtype, int64_t elements,
                  std::byte* message) {
  if (blockIdx.x == 0 && threadIdx.x < 32) clear_between(wire, message, int(threadIdx.x));
  for_blocks(wire.parts.blocks, [&](int64_t block, int lane, bool on) {
    float x[kOwn];
    load_elements(values, dtype, elements, block, lane, on, x);
    EncodedBlock<Format> encoded;
    encoded.encode(wire, x, lane);
    encoded.store(wire, message, block, lane, on);
  });
}

template <typename Format>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(WireJob wire, const std::byte* message, void* values, DType dtype,
                  int64_t elements) {
  for_blocks(wire.parts.blocks, [&](int64_t block, int lane, bool on) {
    EncodedBlock<Format> encoded;
    encoded.load(wire, message, block, lane);
    float x[kOwn];
    encoded.decode(wire, lane, x);
    store_elements(values, dtype, elements, block, lane, on, x);
  });
}

unsigned grid_for(int64_t blocks) {
  const int64_t all = (blocks * kQuad + kThreads - 1) / kThreads;
  return unsigned(std::clamp<int64_t>(all, 1, int64_t(this_share()->sms()) * 8));
}

void check_operands(const char* op, const Wire& wire, const Tensor& values,
                    const std::byte* message) {
  require_encodable_on_gpu(op, wire, values.dtype());
  if (!values.contiguous() || values.device().kind != DeviceKind::cuda) {
    throw InvalidArgument(std::string(op) + ": values " + values.describe() +
                          ": expected a contiguous tensor on a GPU");
  }
  if (reinterpret_cast<uintptr_t>(message) % 16 != 0) {
    throw InvalidArgument(std::string(op) + ": message: expected it at a multiple of 16 bytes");
  }
}

}  // namespace

void require_encodable_on_gpu(const char* op, const Wire& wire, DType dtype) {
  codec::require_encodable(wire, dtype);
  if (codec::is_grouped(wire.codec)) return;
  throw Unsupported(std::string(op) + ": codec " + wire.describe() +
                    ": expected one with groups on GPUs: int8 to int2, e4m3, e5m2, mxfp8, mxfp6 or "
                    "mxfp4");
}

void launch_encode(const Wire& wire, const Tensor& values, std::byte* message,
                   cudaStream_t stream) {
  check_operands("encode", wire, values, message);
  if (values.elements() == 0) return;
  const WireJob job = WireJob::of(wire, values.elements(), values.dtype());
  codec::with_format(wire, [&]<typename Format>(Format) {
    encode_kernel<Format><<<grid_for(job.parts.blocks), kThreads, 0, stream>>>(
        job, values.data(), values.dtype(), values.elements(), message);
  });
  check_launch("encode_kernel");
}

void launch_decode(const Wire& wire, const std::byte* message, const Tensor& values,
                   cudaStream_t stream) {
  check_operands("decode", wire, values, message);
  if (values.elements() == 0) return;
  const WireJob job = WireJob::of(wire, values.elements(), values.dtype());
  codec::with_format(wire, [&]<typename Format>(Format) {
    decode_kernel<Format><<<grid_for(job.parts.blocks), kThreads, 0, stream>>>(
        job, message, values.data(), values.dtype(), values.elements());
  });
  check_launch("decode_kernel");
}

}  // namespace tandem::gpu
