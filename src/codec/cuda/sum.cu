#include "codec/cuda/encode.h"
#include "codec/cuda/grid.h"
#include "codec/cuda/sum.cuh"
#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

constexpr int kPerSm = 2;  // thread blocks, limited by the registers of the sums

template <typename Block>
__global__ void __launch_bounds__(kCodecThreads, kPerSm)
    sum_kernel(const __grid_constant__ WireParams wire, const MessageSum from, std::byte* message,
               void* out) {
  if (message && blockIdx.x == 0 && threadIdx.x < 32) {
    clear_between(wire, message, int(threadIdx.x));
  }
  for_blocks(wire.layout.blocks, [&](int64_t block, int lane, bool on) {
    float sum[kLaneValues];
    sum_messages<Block>(from, wire, block, lane, on, sum);
    if (message) {
      fill_up(wire.layout.elements, block, lane, sum);
      Block encoded;
      encoded.encode(wire, sum, lane);
      encoded.store(wire, message, block, lane, on);
      encoded.decode(wire, lane, sum);
    }
    store_elements(out, from.dtype, wire.layout.elements, block, lane, on, sum);
  });
}

}  // namespace

void launch_sum(const Wire& wire, const std::byte* messages, size_t stride, int count, int local,
                const Tensor& values, std::byte* message, const Tensor& out, cudaStream_t stream) {
  require_encodable_on_gpu("sum", wire, values.dtype());
  check_message("sum", wire, values, messages);
  check_message("sum", wire, out, message);
  if (values.elements() == 0) return;
  const WireParams params = WireParams::of(wire, values.elements(), values.dtype());
  const MessageSum from{messages, stride, count, local, values.data(), values.dtype()};
  with_block(wire, [&]<typename Block>() {
    sum_kernel<Block><<<codec_grid(params.layout.blocks, kPerSm), kCodecThreads, 0, stream>>>(
        params, from, message, out.data());
  });
  check_launch("sum_kernel");
}

}  // namespace tandem::gpu
