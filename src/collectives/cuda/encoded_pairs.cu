#include "collectives/cuda/encoded_pairs.h"

#include <algorithm>
#include <string>

#include "codec/cuda/encode.h"
#include "collectives/cuda/encoded_chunks.cuh"
#include "collectives/cuda/lossless_pairs.cuh"
#include "collectives/cuda/pair_copies.cuh"
#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

constexpr int kMaxChannels = 128, kPairsPerSm = 2;
// Fraction of a GPU's thread blocks that exchange; the rest copy this rank's rows to itself.
constexpr double kExchanging = 5. / 6;

struct PairsParams {
  PairFifos fifos;
  WireParams chunk;
  DType dtype;
  EncodedPairs pairs;

  __device__ int64_t size_of_element() const { return dtype == DType::f32 ? 4 : 2; }
  /// First element of chunk c of this channel.
  __device__ int64_t begin(int channel, int64_t c) const {
    return (c * fifos.channels + channel) * kChunkElements;
  }
  __device__ int64_t chunks(int64_t elements, int channel) const {
    return fifos.chunks_of((elements + kChunkElements - 1) / kChunkElements, channel);
  }
};

// One thread block per peer, direction and channel.
template <typename Block>
__global__ void __launch_bounds__(kPairThreads, kPairsPerSm)
    pairs_kernel(const __grid_constant__ PairsParams params) {
  const int channels = params.fifos.channels;
  const PeerTable& table = params.fifos.table;
  const EncodedPair& local = params.pairs[size_t(table.rank)];
  if (copies_local(local, params.size_of_element(), 2 * (table.size - 1) * channels)) return;
  const int channel = int(blockIdx.x) % channels, unit = int(blockIdx.x) / channels;
  const int peer = peer_at(table, 1 + unit / 2);
  if (__syncthreads_or(threadIdx.x == 0 && params.fifos.gave_up())) return;
  const EncodedPair& pair = params.pairs[size_t(peer)];
  const auto count = [&](int64_t elements, int64_t c) {
    return min(elements - params.begin(channel, c), kChunkElements);
  };
  if (unit % 2 == 0) {
    params.fifos.send(
        peer, channel, params.chunks(pair.send_elements, channel),
        [&](std::byte* slot, int64_t c) {
          encode_chunk<Block>(params.chunk, params.dtype,
                              pair.send + params.begin(channel, c) * params.size_of_element(),
                              count(pair.send_elements, c), slot);
        },
        [&](int64_t c) {
          const int64_t blocks = (count(pair.send_elements, c) + kWireBlock - 1) / kWireBlock;
          return int64_t(params.chunk.layout.bytes) * blocks / params.chunk.layout.blocks;
        });
  } else {
    params.fifos.receive(peer, channel, params.chunks(pair.recv_elements, channel),
                         [&](const std::byte* slot, int64_t c) {
                           decode_chunk<Block>(
                               params.chunk, params.dtype, slot, count(pair.recv_elements, c),
                               pair.recv + params.begin(channel, c) * params.size_of_element());
                         });
  }
}

}  // namespace

EncodedPairExchange::EncodedPairExchange(GpuCommunicator& comm)
    : comm_(comm),
      channels_(std::clamp(
          int(comm.share().sms() * kPairsPerSm * kExchanging) / (2 * std::max(1, comm.size() - 1)),
          1, kMaxChannels)),
      counts_(sizeof(PairCounts) * size_t(channels_) * kMaxGpus),
      lost_(sizeof(unsigned)) {
  fifos_ = std::static_pointer_cast<GpuBuffer>(comm.allocate(
      PairFifos::bytes(channels_, comm.size(), kPairSlotBytes), PairFifos::signals(channels_)));
}

int EncodedPairExchange::copying(int64_t bytes) const {
  constexpr int64_t kAtOnce = 16 * kCopyVectorsAtOnce * kPairThreads;  // bytes per thread block
  const int room = std::max(1, comm_.share().sms() * kPairsPerSm - exchanging());
  return int(std::min<int64_t>((bytes + kAtOnce - 1) / kAtOnce, room));
}

void EncodedPairExchange::run(OpId op, const Wire& wire, DType dtype, const EncodedPairs& pairs) {
  const PairFifos fifos{fifos_->table(),
                        comm_.device_deadline(),
                        op,
                        reinterpret_cast<PairCounts*>(counts_.data()),
                        channels_,
                        kPairSlotBytes,
                        comm_.link_pacer(),
                        reinterpret_cast<unsigned*>(lost_.data())};
  const EncodedPair& local = pairs[size_t(comm_.rank())];
  const int64_t local_bytes =
      local.send == local.recv ? 0 : local.send_elements * int64_t(tandem::size_of(dtype));
  const auto blocks = unsigned(exchanging() + copying(local_bytes));
  if (blocks == 0) return;
  if (wire.codec == Codec::lossless) {
    return launch_lossless_pairs(fifos, dtype, pairs, blocks, comm_.stream());
  }
  const WireParams chunk = WireParams::of(wire, kChunkElements, dtype);
  if (chunk.layout.bytes > size_t(kPairSlotBytes)) {
    throw Unsupported("all_to_all: codec " + wire.describe() + ": chunks of " +
                      std::to_string(chunk.layout.bytes) + " bytes: expected at most " +
                      std::to_string(kPairSlotBytes));
  }
  const PairsParams params{fifos, chunk, dtype, pairs};
  with_block(wire, [&]<typename Block>() {
    pairs_kernel<Block><<<blocks, kPairThreads, 0, comm_.stream()>>>(params);
  });
  check_launch("pairs_kernel");
}

}  // namespace tandem::gpu
