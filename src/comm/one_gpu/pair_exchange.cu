#include "comm/one_gpu/pair_exchange.h"

#include <algorithm>

#include "comm/device/link_pacer.cuh"
#include "comm/device/vector_range.cuh"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxChannels = 8;
constexpr int kChunkBytes = 32 << 10, kDepth = 4;  // depth of a FIFO in chunks

struct PairCounts {
  uint64_t sent, received;
};

// Peer addressing of a kernel: the ranks of one team, or of two teams.
struct OneTeam {
  static constexpr int kMax = kMaxGpus;
  PeerTable table;
  explicit OneTeam(const GpuBuffer& buffer, int, int) : table(buffer.table()) {}
  __device__ int rank() const { return table.rank; }
  __device__ int peer(int step) const { return peer_at(table, step); }
  __device__ std::byte* memory(int of) const { return table.memory[of]; }
  __device__ uint64_t* signals(int of) const { return table.signals[of]; }
};
struct TwoTeams {
  static constexpr int kMax = kMaxSharing;
  RankMemory memories[kMax];
  int local, size;
  explicit TwoTeams(const GpuBuffer& buffer, int rank, int ranks) : local(rank), size(ranks) {
    for (int r = 0; r < ranks; ++r) memories[r] = buffer.rank_memory(r);
  }
  __device__ int rank() const { return local; }
  __device__ int peer(int step) const { return (local + step) % size; }
  __device__ std::byte* memory(int of) const { return memories[of].memory; }
  __device__ uint64_t* signals(int of) const { return memories[of].signals; }
};

template <class Ranks>
struct PairParams {
  Ranks ranks;
  Deadline deadline;
  OpId op;
  PairCounts* counts;  // [channel][peer]
  int channels;
  std::array<PairMessage, Ranks::kMax> messages;
  LinkPacer* link_pacer;

  __device__ PairCounts& count(int channel, int peer) const {
    return counts[channel * Ranks::kMax + peer];
  }
  /// Written by `source` at its destination (arrived), or by the destination at its source (free).
  __device__ uint64_t* signal(int at, bool free, int peer, int channel) const {
    return ranks.signals(at) + (int(free) * Ranks::kMax + peer) * kMaxChannels + channel;
  }
  __device__ uint4* slot(int at, int source, int channel, uint64_t chunk) const {
    const uint64_t fifo = uint64_t(channel) * Ranks::kMax + uint64_t(source);
    return reinterpret_cast<uint4*>(ranks.memory(at) +
                                    (fifo * kDepth + chunk % kDepth) * kChunkBytes);
  }
};

/// Number of chunks on `channel`: chunk c of the message is chunk c / channels of channel c %
/// channels.
template <class Ranks>
__device__ int64_t chunks_of(const PairParams<Ranks>& params, int64_t bytes, int channel) {
  const int64_t all = (bytes + kChunkBytes - 1) / kChunkBytes;
  return (all + params.channels - 1 - channel) / params.channels;
}

/// Calls step(slot, range, chunk) for every chunk, by the whole block. One thread calls wait(chunk)
/// and tell(chunk); after a wait fails, no further step is done or signalled.
template <bool kAligned, class Ranks, typename Wait, typename Step, typename Tell>
__device__ int64_t walk(const PairParams<Ranks>& params, const void* memory, int64_t bytes,
                        int channel, const Wait& wait, const Step& step, const Tell& tell) {
  const int64_t chunks = chunks_of(params, bytes, channel);
  for (int64_t c = 0; c < chunks; ++c) {
    const bool came = threadIdx.x != 0 || wait(c);
    if (!__syncthreads_and(came)) return -1;
    const int64_t begin = (c * params.channels + channel) * kChunkBytes;
    const auto range = vector_range<kAligned>(static_cast<const std::byte*>(memory) + begin,
                                              min(bytes - begin, int64_t(kChunkBytes)));
    for (int vec = int(threadIdx.x); vec < range.vecs(); vec += kThreads) step(range, vec, c);
    __syncthreads();
    if (threadIdx.x == 0) tell(c);
  }
  return chunks;
}

template <bool kAligned, class Ranks>
__device__ void send(const PairParams<Ranks>& params, int peer, int channel) {
  const PairMessage& message = params.messages[size_t(peer)];
  PairCounts& count = params.count(channel, peer);
  const uint64_t first = count.sent;
  const int64_t done = walk<kAligned>(
      params, message.send, message.send_bytes, channel,
      [&](int64_t c) {
        const int64_t need = int64_t(first) + c + 1 - kDepth;
        return need <= 0 ||
               wait_signal(params.signal(params.ranks.rank(), true, peer, channel), uint64_t(need),
                           extend_deadline(params.deadline), params.op, peer, channel);
      },
      [&](const VectorRange<kAligned>& range, int vec, int64_t c) {
        params.slot(peer, params.ranks.rank(), channel, first + uint64_t(c))[vec] = range.load(vec);
      },
      [&](int64_t c) {
        const int64_t begin = (c * params.channels + channel) * kChunkBytes;
        pace(params.link_pacer, min(message.send_bytes - begin, int64_t(kChunkBytes)));
        release_signal(params.signal(peer, false, params.ranks.rank(), channel),
                       first + uint64_t(c) + 1);
      });
  if (threadIdx.x == 0 && done > 0) count.sent = first + uint64_t(done);
}

template <bool kAligned, class Ranks>
__device__ void receive(const PairParams<Ranks>& params, int peer, int channel) {
  const PairMessage& message = params.messages[size_t(peer)];
  PairCounts& count = params.count(channel, peer);
  const uint64_t first = count.received;
  const int64_t done = walk<kAligned>(
      params, message.recv, message.recv_bytes, channel,
      [&](int64_t c) {
        return wait_signal(params.signal(params.ranks.rank(), false, peer, channel),
                           first + uint64_t(c) + 1, params.deadline, params.op, peer, channel);
      },
      [&](const VectorRange<kAligned>& range, int vec, int64_t c) {
        range.store(
            vec,
            load_fresh(params.slot(params.ranks.rank(), peer, channel, first + uint64_t(c)) + vec));
      },
      [&](int64_t c) {
        pace(params.link_pacer, 0);
        release_signal(params.signal(peer, true, params.ranks.rank(), channel),
                       first + uint64_t(c) + 1);
      });
  if (threadIdx.x == 0 && done > 0) count.received = first + uint64_t(done);
}

__device__ bool is_aligned(const void* memory, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(memory) | uintptr_t(bytes)) % 16 == 0;
}

// One block for each peer, direction and channel.
template <class Ranks>
__global__ void __launch_bounds__(kThreads)
    pair_kernel(const __grid_constant__ PairParams<Ranks> params) {
  const int channel = int(blockIdx.x) % params.channels, unit = int(blockIdx.x) / params.channels;
  const int peer = params.ranks.peer(1 + unit / 2);
  // After an earlier call timed out, a late peer must not accept this call's messages.
  if (__syncthreads_or(threadIdx.x == 0 && has_failed(params.deadline))) return;
  const PairMessage& message = params.messages[size_t(peer)];
  if (unit % 2 == 0) {
    is_aligned(message.send, message.send_bytes) ? send<true>(params, peer, channel)
                                                 : send<false>(params, peer, channel);
  } else {
    is_aligned(message.recv, message.recv_bytes) ? receive<true>(params, peer, channel)
                                                 : receive<false>(params, peer, channel);
  }
}

}  // namespace

PairExchange::PairExchange(GpuCommunicator& comm)
    : comm_(comm),
      channels_(
          std::clamp(comm.share().sms() / (2 * std::max(1, comm.size() - 1)), 1, kMaxChannels)) {
  const size_t ranks = comm.one_node() ? OneTeam::kMax : TwoTeams::kMax;
  counts_ = DeviceMemory(sizeof(PairCounts) * kMaxChannels * ranks);
  fifos_ = std::static_pointer_cast<GpuBuffer>(comm.allocate(
      size_t(channels_) * ranks * kDepth * kChunkBytes, int(2 * ranks) * kMaxChannels));
}

template <class Ranks>
void PairExchange::launch(const PairMessages& messages, OpId op, cudaStream_t stream) {
  PairParams<Ranks> params{Ranks(*fifos_, comm_.rank(), comm_.size()),
                           comm_.device_deadline(),
                           op,
                           reinterpret_cast<PairCounts*>(counts_.data()),
                           channels_,
                           {},
                           comm_.link_pacer()};
  std::copy_n(messages.begin(), Ranks::kMax, params.messages.begin());
  pair_kernel<Ranks><<<unsigned(2 * (comm_.size() - 1) * channels_), kThreads, 0, stream>>>(params);
  check_launch("pair_kernel");
}

void PairExchange::run(const PairMessages& messages, OpId op, cudaStream_t stream) {
  if (comm_.size() == 1) return;
  comm_.one_node() ? launch<OneTeam>(messages, op, stream) : launch<TwoTeams>(messages, op, stream);
}

}  // namespace tandem::gpu
