// Chunks of shards in flight between GPUs in the kernels of shard_exchange.h: addresses, FIFO
// slots, and the counts that tell when a chunk has arrived or been read. A shard is one rank's rows
// of the whole tensor (partition.h).
#pragma once

#include "collectives/cuda/partition.h"
#include "comm/device/link_pacer.cuh"

namespace tandem::gpu {

// 128 blocks with two roles, for H200's 132 SMs; more channels would share SMs, and a role whose
// stores wait for the link blocks the loads of others on its SM (docs/results/gpu-experiments.md).
constexpr int kShardChannels = 64;
// 32 KiB: a chunk ends with a fence that waits for its arrival; with 16 KiB an all-gather of 256
// MiB took 556 us instead of 509 (docs/results/gpu-experiments.md).
constexpr int kMaxChunkVecs = 2048;
// Number of chunks: one being stored, one in flight, one being read and one whose count is being
// returned; each more would take 2 lanes x 64 channels x 32 KiB, 4 MiB per rank, in every GPU's
// memory.
constexpr int kFifoDepth = 4;
constexpr int kFlowLanes = 2;
enum Lane { kShards, kSums };

/// Counts of one lane, block and peer, in this rank's memory.
struct FlowCounts {
  uint64_t sent, received;
  uint64_t free;  ///< the peer's count at the end of the last call: often all that a call needs
};

struct ShardParams : Partition {
  PeerTable table;
  Deadline deadline, patience;  ///< `patience`: extended deadline, for waits on ranks that may wait
  OpId op;
  FlowCounts* counts;
  int vecs;               ///< per chunk
  int channels;           ///< each has a block per role
  LinkPacer* link_pacer;  ///< emulated link, or null

  /// Channel of this block, in one of gridDim / channels roles. Blocks of a channel are
  /// consecutive, so that the resident ones can finish if others do not fit.
  __device__ int channel() const { return int(blockIdx.x) / (int(gridDim.x) / channels); }
  __device__ int role() const { return int(blockIdx.x) % (int(gridDim.x) / channels); }

  __device__ int64_t bytes_of(int rank) const { return begins[rank + 1] - begins[rank]; }
  /// Chunks of this block in a shard of `bytes` bytes.
  __device__ int64_t chunks_of(int64_t bytes) const {
    const int64_t chunk = int64_t(vecs) * 16;
    return ((bytes + chunk - 1) / chunk + channels - 1 - channel()) / channels;
  }
  /// Offset of a chunk of this block in a shard.
  __device__ int64_t begin_of(int64_t chunk) const {
    return (chunk * channels + channel()) * vecs * 16;
  }
  /// 0 if a shard of `bytes` bytes has no such chunk.
  __device__ int bytes_of_chunk(int64_t bytes, int64_t chunk) const {
    return int(max(int64_t(0), min(bytes - begin_of(chunk), int64_t(vecs) * 16)));
  }
};

/// Chunks of this block: those in the shard of the rank that this thread of a warp counts, which
/// has `bytes`, and max over all shards but the local one.
struct PeerChunks {
  int64_t bytes, counted, maximum = 0;

  __device__ explicit PeerChunks(const ShardParams& params)
      : bytes(params.bytes_of(min(int(threadIdx.x) % 32, params.table.size - 1))),
        counted(params.chunks_of(bytes)) {
    for (int step = 1; step < params.table.size; ++step) {
      maximum = max(maximum, params.chunks_of(params.bytes_of(peer_at(params.table, step))));
    }
  }
};

/// Votes, and makes what one thread acquired visible to the whole warp, unlike a bare vote.
__device__ inline bool all_of_warp(bool came) {
  const bool all = __all_sync(~0u, came);
  __syncwarp();
  return all;
}

/// One lane, in one direction, as seen by a warp: thread p counts the chunks to or from rank p;
/// there are `chunks` of them in this call. All threads of the warp make each call, and get the
/// same result of a wait: false on a timeout.
class Flow {
 public:
  __device__ Flow(const ShardParams& params, Lane lane, bool sends)
      : params_(params), lane_(lane), peer_(int(threadIdx.x) % 32) {
    counts_ = peer_ < params.table.size && peer_ != params.table.rank;
    if (peer_ >= params.table.size) return;
    const FlowCounts& before = counts();
    first_ = sends ? before.sent : before.received;
    free_ = before.free;
  }

  /// Waits until chunk `chunk` has a free slot at all its receivers. A peer without one is waiting
  /// itself, unless it is the missing rank.
  __device__ bool wait_for_room(int64_t chunk, int64_t chunks) {
    const int64_t need = int64_t(first_) + chunk + 1 - kFifoDepth;
    bool came = true;
    if (counts_ && chunk < chunks && need > int64_t(free_)) {
      const uint64_t* word = signal(params_.table.rank, true, peer_);
      came = wait(word, uint64_t(need), params_.patience);
      free_ = acquire_signal(word);
    }
    return all_of_warp(came);
  }
  /// Waits until it has arrived from all its senders.
  __device__ bool wait_for_arrival(int64_t chunk, int64_t chunks) const {
    // Ranks that send sums wait for shards first, and report the missing rank.
    const bool came = !counts_ || chunk >= chunks ||
                      wait(signal(params_.table.rank, false, peer_), first_ + uint64_t(chunk) + 1,
                           lane_ == kSums ? params_.patience : params_.deadline);
    return all_of_warp(came);
  }
  __device__ uint4* to(int peer, int64_t chunk) const {
    return slot(peer, params_.table.rank, first_of(peer) + uint64_t(chunk));
  }
  __device__ const uint4* from(int peer, int64_t chunk) const {
    return slot(params_.table.rank, peer, first_of(peer) + uint64_t(chunk));
  }

  /// Signals from the summing block to the one that sends the sums: chunk `chunk` of the local
  /// shard.
  __device__ void tell_summed(int64_t chunk) const {
    if (peer_ == params_.table.rank) release_signal(local_signal(), first_ + uint64_t(chunk) + 1);
  }
  __device__ bool wait_for_sum(int64_t chunk) const {
    // The summing block waits for the peers, and reports the missing rank.
    const bool came = peer_ != params_.table.rank ||
                      wait(local_signal(), first_ + uint64_t(chunk) + 1, params_.patience);
    return all_of_warp(came);
  }
  /// Called by one warp of those that share a lane, once all have stored (or read) chunk `chunk`.
  /// `shard_bytes`: bytes of the shard that is sent to this thread's peer.
  __device__ void tell_arrived(int64_t chunk, int64_t chunks, int64_t shard_bytes) const {
    tell(false, chunk, chunks, shard_bytes);
  }
  __device__ void tell_free(int64_t chunk, int64_t chunks) const { tell(true, chunk, chunks, 0); }
  /// Called last by the same warp.
  __device__ void end_sending(int64_t chunks) const {
    if (lane_ == kSums && peer_ == params_.table.rank) counts().sent = first_ + uint64_t(chunks);
    if (!counts_) return;
    counts().sent = first_ + uint64_t(chunks);
    counts().free = acquire_signal(signal(params_.table.rank, true, peer_));
  }
  __device__ void end_receiving(int64_t chunks) const {
    if (counts_) counts().received = first_ + uint64_t(chunks);
  }

 private:
  __device__ FlowCounts& counts() const {
    return params_.counts[(lane_ * kShardChannels + params_.channel()) * kMaxGpus + peer_];
  }
  __device__ uint64_t* signal(int at, bool free, int peer) const {
    return params_.table.signals[at] + ((lane_ * 2 + free) * kMaxGpus + peer) * kShardChannels +
           params_.channel();
  }
  __device__ uint64_t* local_signal() const {
    return signal(params_.table.rank, false, params_.table.rank);
  }
  __device__ uint4* slot(int at, int source, uint64_t chunk) const {
    const int64_t fifo =
        (int64_t(lane_) * kShardChannels + params_.channel()) * params_.table.size + source;
    return reinterpret_cast<uint4*>(params_.table.memory[at]) +
           (fifo * kFifoDepth + int64_t(chunk % kFifoDepth)) * kMaxChunkVecs;
  }
  __device__ uint64_t first_of(int peer) const { return __shfl_sync(~0u, first_, peer); }
  __device__ bool wait(const uint64_t* word, uint64_t count, const Deadline& deadline) const {
    return wait_signal(word, count, deadline, params_.op, peer_, params_.channel());
  }
  __device__ void tell(bool free, int64_t chunk, int64_t chunks, int64_t shard_bytes) const {
    if (!counts_ || chunk >= chunks) return;
    if (params_.link_pacer) pace(params_.link_pacer, params_.bytes_of_chunk(shard_bytes, chunk));
    release_signal(signal(peer_, free, params_.table.rank), first_ + uint64_t(chunk) + 1);
  }

  const ShardParams& params_;
  Lane lane_;
  int peer_;
  bool counts_;
  uint64_t first_ = 0, free_ = 0;
};

}  // namespace tandem::gpu
