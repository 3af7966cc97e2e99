// FIFOs between pairs of ranks, one for each (channel, source) in the destination's memory: the
// source fills a slot and counts it as arrived, the destination counts it as free when it has read
// it. Counts go on from call to call, in device memory, so a captured call can be replayed.
// Messages of a pair are matched in the order of their calls.
//
// A thread block serves one peer, direction and channel. Chunk c of a message is chunk c / channels
// of channel c % channels; all ranks have as many channels.
#pragma once

#include "comm/device/line.cuh"

namespace tandem::gpu {

struct PairCounts {
  uint64_t sent, received;
};

struct PairFifos {
  static constexpr int kDepth = 4;  ///< in chunks

  PeerTable table;
  Watch watch;
  OpId op;
  PairCounts* counts;  ///< [channel][peer], of kMaxGpus peers
  int channels;
  int64_t slot_bytes;
  Line* line;      ///< of an emulated link
  unsigned* lost;  ///< in device memory: not 0 once a wait has timed out

  /// Whether an earlier call gave up on a peer: one that comes late must not take what it is sent
  /// now, nor its messages be taken for later ones. The host's error record would say so, too, but
  /// thread blocks that all read it at their start wait for one another's answers from the host.
  __device__ bool gave_up() const { return *static_cast<const volatile unsigned*>(lost) != 0; }

  /// Bytes of memory and signals that `channels` need in a symmetric buffer.
  static size_t bytes(int channels, int ranks, int64_t slot_bytes) {
    return size_t(channels) * size_t(ranks) * kDepth * size_t(slot_bytes);
  }
  static int signals(int channels) { return 2 * kMaxGpus * channels; }

  /// Of this channel, of a message of `all`.
  __device__ int64_t chunks_of(int64_t all, int channel) const {
    return (all + channels - 1 - channel) / channels;
  }

  /// fill(slot, chunk), by the whole thread block, for the chunks that go to `peer`; bytes(chunk)
  /// are what a link has to carry.
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
                                          patient(watch), op, peer, channel);
        },
        [&](int64_t c) { fill(slot(peer, table.rank, channel, first + uint64_t(c)), c); },
        [&](int64_t c) {
          pace(line, bytes(c));
          release_signal(signal(peer, false, table.rank, channel), first + uint64_t(c) + 1);
        });
    if (threadIdx.x == 0 && done) count.sent = first + uint64_t(chunks);
  }

  /// take(slot, chunk), by the whole thread block, for the chunks that come from `peer`.
  template <typename Take>
  __device__ void receive(int peer, int channel, int64_t chunks, const Take& take) const {
    PairCounts& count = counts[channel * kMaxGpus + peer];
    const uint64_t first = count.received;
    const bool done = walk(
        chunks,
        [&](int64_t c) {
          return wait_signal(signal(table.rank, false, peer, channel), first + uint64_t(c) + 1,
                             watch, op, peer, channel);
        },
        [&](int64_t c) { take(slot(table.rank, peer, channel, first + uint64_t(c)), c); },
        [&](int64_t c) {
          pace(line, 0);
          release_signal(signal(peer, true, table.rank, channel), first + uint64_t(c) + 1);
        });
    if (threadIdx.x == 0 && done) count.received = first + uint64_t(chunks);
  }

 private:
  /// wait(chunk) and tell(chunk) are of one thread; where a wait fails, nothing more is done or
  /// told.
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
