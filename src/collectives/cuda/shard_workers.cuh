// Roles of the blocks of shard_exchange.h, one per block. Any GPU, any alignment.
#pragma once

#include "collectives/cuda/shard_flow.cuh"
#include "comm/device/shared_word.cuh"
#include "comm/device/vector_range.cuh"
#include "core/cuda/element.cuh"

namespace tandem::gpu {

constexpr int kAtOnce = 4;  // vecs (16-byte vectors) that a thread loads before it stores them

/// Warps of a block: workers, each of which processes its vecs of every chunk and continues with
/// the next, and a last warp that signals completed chunks to the peers. A worker that timed out
/// stores nothing more, and nothing is signalled from then on: a late peer, after others have timed
/// out, must not take unsent or overwritten data for its own.
template <int kWorkers>
class Group {
 public:
  static constexpr int kWorkerThreads = 32 * kWorkers;
  static constexpr int kThreads = kWorkerThreads + 32;

  /// Resets all counts. Called by all threads of the block.
  __device__ explicit Group(unsigned* shared) : done_(shared) {
    if (int(threadIdx.x) <= kWorkers) done_[threadIdx.x] = 0;
    __syncthreads();
  }
  __device__ static bool signals() { return int(threadIdx.x) >= kWorkerThreads; }
  /// Called by all threads of a worker: counts one more chunk; `lost`: one of its waits timed out.
  __device__ void worked(bool lost) const {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    if (lost) static_cast<volatile unsigned*>(done_)[kWorkers] = 1;
    add_to_word(done_[threadIdx.x / 32], 1);
  }
  /// Called by the last warp: waits until all workers have done `chunks`; true if peers may be
  /// signalled. Bounded by the workers, which count every chunk, even after a timeout.
  __device__ bool wait_for_work(int64_t chunks) const {
    while (read_word(done_[threadIdx.x % kWorkers]) < unsigned(chunks)) {
    }
    __syncwarp();
    return all_of_warp(static_cast<const volatile unsigned*>(done_)[kWorkers] == 0);
  }
  /// Calls store(vec, load(vec)) for this thread's vecs of a chunk. ready() is called before the
  /// first store; if false, nothing is stored. The next vecs are loaded before these are stored:
  /// loads issued after stores that wait for the link wait, too.
  template <typename Load, typename Ready, typename Store>
  __device__ static void copy(int vecs, const Load& load, const Ready& ready, const Store& store) {
    constexpr int kStep = kAtOnce * kWorkerThreads;
    const auto read = [&](uint4* words, int begin) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begin + i * kWorkerThreads < vecs) words[i] = load(begin + i * kWorkerThreads);
      }
    };
    const auto write = [&](const uint4* words, int begin) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begin + i * kWorkerThreads < vecs) store(begin + i * kWorkerThreads, words[i]);
      }
    };
    uint4 even[kAtOnce], odd[kAtOnce];
    int begin = int(threadIdx.x);
    read(even, begin);
    if (!ready()) return;
    for (; begin < vecs; begin += 2 * kStep) {
      read(odd, begin + kStep);
      write(even, begin);
      read(even, begin + 2 * kStep);
      write(odd, begin + kStep);
    }
  }

 private:
  unsigned* done_;  // shared: chunks done per worker, then whether one has timed out
};

/// Chunk `chunk` of a shard.
template <bool kAligned>
__device__ VectorRange<kAligned> chunk_of(const ShardParams& params, const std::byte* shard,
                                          int64_t bytes, int64_t chunk) {
  return vector_range<kAligned>(shard + params.begin_of(chunk),
                                params.bytes_of_chunk(bytes, chunk));
}

/// Sends the shard at `shard` to all peers, and copies it to `copy` if that differs. wait_for(c)
/// waits until its chunk c is ready; false on a timeout.
template <bool kAligned, int kWorkers, typename WaitFor>
__device__ void send_local(const ShardParams& params, Lane lane, const Group<kWorkers>& group,
                           const std::byte* shard, std::byte* copy, const WaitFor& wait_for) {
  const int64_t bytes = params.bytes_of(params.table.rank), chunks = params.chunks_of(bytes);
  Flow flow(params, lane, true);
  bool lost = false;
  for (int64_t c = 0; c < chunks; ++c) {
    if (group.signals()) {
      if (group.wait_for_work(c + 1)) flow.tell_arrived(c, chunks, bytes);
      continue;
    }
    lost = lost || !wait_for(c);
    const auto range = chunk_of<kAligned>(params, shard, bytes, c),
               target = chunk_of<kAligned>(params, copy, bytes, c);
    for (int step = 1; step < params.table.size; ++step) {
      uint4* to = flow.to(peer_at(params.table, step), c);
      const bool first = step == 1, copies = first && copy != shard;
      group.copy(
          range.vecs(), [&](int vec) { return range.load(vec); },
          [&] {
            if (first) lost = lost || !flow.wait_for_room(c, chunks);
            return !lost;
          },
          [&](int vec, const uint4& words) {
            to[vec] = words;
            if (copies) target.store(vec, words);
          });
    }
    group.worked(lost);
  }
  if (group.signals()) flow.end_sending(chunks);
}

/// Sends every other shard of the tensor at `in` to its owner.
template <bool kAligned, int kWorkers>
__device__ void send_shards(const ShardParams& params, const Group<kWorkers>& group) {
  const PeerChunks chunks(params);
  Flow flow(params, kShards, true);
  bool lost = false;
  for (int64_t c = 0; c < chunks.maximum; ++c) {
    if (group.signals()) {
      if (group.wait_for_work(c + 1)) flow.tell_arrived(c, chunks.counted, chunks.bytes);
      continue;
    }
    for (int step = 1; step < params.table.size; ++step) {
      const int peer = peer_at(params.table, step);
      const auto range =
          chunk_of<kAligned>(params, params.in + params.begins[peer], params.bytes_of(peer), c);
      uint4* to = flow.to(peer, c);
      group.copy(
          range.vecs(), [&](int vec) { return range.load(vec); },
          [&] {
            if (step == 1) lost = lost || !flow.wait_for_room(c, chunks.counted);
            return !lost;
          },
          [&](int vec, const uint4& words) { to[vec] = words; });
    }
    group.worked(lost);
  }
  if (group.signals()) flow.end_sending(chunks.counted);
}

/// Receives every other shard of the tensor at `out`.
template <bool kAligned, int kWorkers>
__device__ void receive_shards(const ShardParams& params, Lane lane, const Group<kWorkers>& group) {
  const PeerChunks chunks(params);
  const Flow flow(params, lane, false);
  bool lost = false;
  for (int64_t c = 0; c < chunks.maximum; ++c) {
    if (group.signals()) {
      if (group.wait_for_work(c + 1)) flow.tell_free(c, chunks.counted);
      continue;
    }
    lost = lost || !flow.wait_for_arrival(c, chunks.counted);
    for (int step = 1; step < params.table.size; ++step) {
      const int peer = peer_at(params.table, step);
      const auto range =
          chunk_of<kAligned>(params, params.out + params.begins[peer], params.bytes_of(peer), c);
      const uint4* from = flow.from(peer, c);
      group.copy(
          range.vecs(), [&](int vec) { return load_fresh(from + vec); }, [&] { return !lost; },
          [&](int vec, const uint4& words) { range.store(vec, words); });
    }
    group.worked(lost);
  }
  if (group.signals()) flow.end_receiving(chunks.counted);
}

/// Sums the local shard: `shard` and those of the peers, in rank order in f32, to `to`. The last
/// warp calls summed(c) when chunk c is stored.
template <bool kAligned, typename T, int kWorkers, typename Summed>
__device__ void sum_local(const ShardParams& params, const std::byte* shard, std::byte* to,
                          const Group<kWorkers>& group, const Summed& summed) {
  constexpr int kRanks = 2;  // ranks with vecs in flight together
  constexpr int kElements = Vec<T>::kElements, kWorkerThreads = Group<kWorkers>::kWorkerThreads;
  const int size = params.table.size, self = params.table.rank;
  const int64_t bytes = params.bytes_of(self), chunks = params.chunks_of(bytes);
  const Flow flow(params, kShards, false);
  bool lost = false;
  for (int64_t c = 0; c < chunks; ++c) {
    if (group.signals()) {
      if (!group.wait_for_work(c + 1)) continue;
      summed(c);
      flow.tell_free(c, chunks);
      continue;
    }
    lost = lost || !flow.wait_for_arrival(c, chunks);
    const auto local = chunk_of<kAligned>(params, shard, bytes, c),
               result = chunk_of<kAligned>(params, to, bytes, c);
    // Steps are equal for all threads of a warp.
    for (int begin = 0; begin < local.vecs(); begin += kAtOnce * kWorkerThreads) {
      const auto vec = [&](int i) { return begin + i * kWorkerThreads + int(threadIdx.x); };
      float sum[kAtOnce][kElements] = {};
      for (int r0 = 0; r0 < size; r0 += kRanks) {
        uint4 words[kRanks][kAtOnce];
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
          if (r0 + r >= size) continue;
          const uint4* from = flow.from(r0 + r, c);
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            if (vec(i) >= local.vecs()) continue;
            words[r][i] = r0 + r == self ? local.load(vec(i)) : load_fresh(from + vec(i));
          }
        }
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
          if (r0 + r >= size) continue;
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const auto& values = reinterpret_cast<const Vec<T>&>(words[r][i]);
#pragma unroll
            for (int e = 0; e < kElements; ++e) sum[i][e] += to_float(values.at[e]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        Vec<T> rounded;
#pragma unroll
        for (int e = 0; e < kElements; ++e) rounded.at[e] = from_float<T>(sum[i][e]);
        if (vec(i) < local.vecs() && !lost) {
          result.store(vec(i), reinterpret_cast<const uint4&>(rounded));
        }
      }
    }
    group.worked(lost);
  }
  if (group.signals()) flow.end_receiving(chunks);
}

}  // namespace tandem::gpu
