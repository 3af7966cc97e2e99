// FIFOs between pairs of ranks, one for each (channel, source) in the destination's memory: the
// source fills a slot and counts it as arrived, the destination counts it as free after reading it.
// Counts continue from call to call, in device memory, so a captured call can be replayed. Messages
// of a pair are matched in the order of their calls.
//
// A thread block serves one peer, direction and channel. Chunk c of a message is chunk c / channels
// of channel c % channels; all ranks have the same number of channels.
#pragma once

#include "comm/device/link_pacer.cuh"

namespace tandem::gpu {

struct PairCounts {
  uint64_t sent, received;
};

struct PairFifos {
  static constexpr int kDepth = 4;  ///< chunks per FIFO

  PeerTable table;
  Deadline deadline;
  OpId op;
  PairCounts* counts;  ///< [channel][peer], kMaxGpus peers
  int channels;
  int64_t slot_bytes;
  LinkPacer* link_pacer;  ///< pacer of an emulated link
  unsigned* lost;         ///< device memory: nonzero once a wait has timed out

  /// Whether an earlier call timed out on a peer: a late peer must not accept this call's messages,
  /// nor its messages be matched with later ones. The host's error record has the same information,
  /// but thread blocks that all read it at their start would queue for replies from the host.
  __device__ bool gave_up() const { return *static_cast<const volatile unsigned*>(lost) != 0; }

  /// Bytes of memory and signals that `channels` need in a symmetric buffer.
  static size_t bytes(int channels, int ranks, int64_t slot_bytes) {
    return size_t(channels) * size_t(ranks) * kDepth * size_t(slot_bytes);
  }
  static int signals(int channels) { return 2 * kMaxGpus * channels; }

  /// Number of this channel's chunks in a message of `all` chunks.
  __device__ int64_t chunks_of(int64_t all, int channel) const {
    return (all + channels - 1 - channel) / channels;
  }

  /// Sends chunks to `peer`. The whole thread block calls fill(slot, chunk) for each; bytes(chunk)
  /// is the number of bytes on the link.
  template <typename Fill, typename Bytes>
  __device__ void send(int peer, int channel, int64_t chunks, const Fill& fill,
                       const Bytes& bytes) const {
    PairCounts& count = counts[channel * kMaxGpus + peer];
    const uint64_t first = count.sent;
    const bool done = walk(
        chunks,
        [&](int64_t c) {
          const int64_t need = int64_t(first) + c + 1 - kDepth;
          return need <= 0 || wait_signal(signal(table.rank, true, peer, channel), uint64_t(need),
                                          extend_deadline(deadline), op, peer, channel);
        },
        [&](int64_t c) { fill(slot(peer, table.rank, channel, first + uint64_t(c)), c); },
        [&](int64_t c) {
          pace(link_pacer, bytes(c));
          release_signal(signal(peer, false, table.rank, channel), first + uint64_t(c) + 1);
        });
    if (threadIdx.x == 0 && done) count.sent = first + uint64_t(chunks);
  }

  /// Receives chunks from `peer`. The whole thread block calls take(slot, chunk) for each.
  template <typename Take>
  __device__ void receive(int peer, int channel, int64_t chunks, const Take& take) const {
    PairCounts& count = counts[channel * kMaxGpus + peer];
    const uint64_t first = count.received;
    const bool done = walk(
        chunks,
        [&](int64_t c) {
          return wait_signal(signal(table.rank, false, peer, channel), first + uint64_t(c) + 1,
                             deadline, op, peer, channel);
        },
        [&](int64_t c) { take(slot(table.rank, peer, channel, first + uint64_t(c)), c); },
        [&](int64_t c) {
          pace(link_pacer, 0);
          release_signal(signal(peer, true, table.rank, channel), first + uint64_t(c) + 1);
        });
    if (threadIdx.x == 0 && done) count.received = first + uint64_t(chunks);
  }

 private:
  /// Calls wait(chunk) and tell(chunk) from one thread. After a wait fails, no further step is done
  /// or signalled.
  template <typename Wait, typename Step, typename Tell>
  __device__ bool walk(int64_t chunks, const Wait& wait, const Step& step, const Tell& tell) const {
    for (int64_t c = 0; c < chunks; ++c) {
      const bool came = threadIdx.x != 0 || wait(c);
      if (!__syncthreads_and(came)) {
        if (threadIdx.x == 0) *static_cast<volatile unsigned*>(lost) = 1;
        return false;
      }
      step(c);
      __syncthreads();
      if (threadIdx.x == 0) tell(c);
    }
    return true;
  }
  /// Written by `peer` at its destination (arrived), or by the destination at its source (free).
  __device__ uint64_t* signal(int at, bool free, int peer, int channel) const {
    return table.signals[at] + (int(free) * kMaxGpus + peer) * channels + channel;
  }
  __device__ std::byte* slot(int at, int source, int channel, uint64_t chunk) const {
    const uint64_t fifo = uint64_t(channel) * uint64_t(table.size) + uint64_t(source);
    return table.memory[at] + (fifo * kDepth + chunk % kDepth) * uint64_t(slot_bytes);
  }
};

}  // namespace tandem::gpu
