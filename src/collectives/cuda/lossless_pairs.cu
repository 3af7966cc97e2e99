#include "collectives/cuda/lossless_pairs.cuh"

#include "collectives/cuda/lossless_chunks.cuh"
#include "collectives/cuda/pair_copies.cuh"
#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

static_assert(kPairThreads == 32 * kChunkWarps);

struct LosslessPairsParams {
  PairFifos fifos;
  LosslessParams chunk;
  EncodedPairs pairs;
};

/// Returns the bytes sent.
__device__ int64_t send_chunk(const LosslessParams& params, const std::byte* values,
                              std::byte* scratch, std::byte* slot) {
  for (int pass = 0; pass < 3; ++pass) {
    encode_chunk_pass(params, pass, values, scratch);
    __syncthreads();
  }
  const bool coded = *reinterpret_cast<const uint32_t*>(scratch) != 0;
  const auto used = int64_t(used_bytes(params, scratch));
  copy_bytes<4, AnyLoad>(scratch, slot, coded ? (used + 15) / 16 * 16 : 16);
  if (!coded) copy_bytes<4>(values, slot + 16, used - 16);
  return used;
}

__device__ void take_chunk(const LosslessParams& params, const std::byte* slot, std::byte* values) {
  if (__ldcg(reinterpret_cast<const uint32_t*>(slot)) == 0) {
    return copy_bytes<4>(slot + 16, values, int64_t(params.room) - 16);
  }
  for (int pass = 0; pass < 2; ++pass) {
    decode_chunk_pass(params, pass, slot, values);
    __syncthreads();
  }
}

// One thread block per peer, direction and channel, as in pairs_kernel.
__global__ void __launch_bounds__(kPairThreads, 2)
    lossless_pairs_kernel(const __grid_constant__ LosslessPairsParams params) {
  __shared__ uint4 memory[kPairSlotBytes / sizeof(uint4)];
  auto* const scratch = reinterpret_cast<std::byte*>(memory);  // used by sending blocks
  const int channels = params.fifos.channels;
  const PeerTable& table = params.fifos.table;
  const EncodedPair& local = params.pairs[size_t(table.rank)];
  const int64_t size = params.chunk.dtype == DType::f32 ? 4 : 2;
  if (copies_local(local, size, 2 * (table.size - 1) * channels)) return;
  const int channel = int(blockIdx.x) % channels, unit = int(blockIdx.x) / channels;
  const int peer = peer_at(table, 1 + unit / 2);
  if (__syncthreads_or(threadIdx.x == 0 && params.fifos.gave_up())) return;
  const EncodedPair& pair = params.pairs[size_t(peer)];
  const int64_t each = params.chunk.elements;
  const auto begin = [&](int64_t c) { return (c * channels + channel) * each; };
  const auto chunk = [&](int64_t elements, int64_t c) {
    return chunk_of(params.chunk, min(elements - begin(c), each));
  };
  const auto chunks = [&](int64_t elements) {
    return params.fifos.chunks_of((elements + each - 1) / each, channel);
  };
  if (unit % 2 == 0) {
    int64_t sent = 0;
    params.fifos.send(
        peer, channel, chunks(pair.send_elements),
        [&](std::byte* slot, int64_t c) {
          sent =
              send_chunk(chunk(pair.send_elements, c), pair.send + begin(c) * size, scratch, slot);
        },
        [&](int64_t) { return sent; });
  } else {
    params.fifos.receive(
        peer, channel, chunks(pair.recv_elements), [&](const std::byte* slot, int64_t c) {
          take_chunk(chunk(pair.recv_elements, c), slot, pair.recv + begin(c) * size);
        });
  }
}

}  // namespace

void launch_lossless_pairs(const PairFifos& fifos, DType dtype, const EncodedPairs& pairs,
                           unsigned blocks, cudaStream_t stream) {
  const LosslessPairsParams params{fifos, whole_chunk(dtype), pairs};
  lossless_pairs_kernel<<<blocks, kPairThreads, 0, stream>>>(params);
  check_launch("lossless_pairs_kernel");
}

}  // namespace tandem::gpu
