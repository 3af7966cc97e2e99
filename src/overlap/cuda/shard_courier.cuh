// The couriers of a persistent kernel: one warp of every block carries its part of the own shard
// into the peers' gathered buffers, by ordinary stores at the pace of the wire, while the others
// multiply. A row's chunk is 2 KiB, what a warp holds at once; it is read once for all stops that
// are served together. One fence covers what a block sends of a chunk; it falls into the pause
// before the block's next piece.
#pragma once

#include "comm/nccl/device_signal.cuh"
#include "overlap/cuda/shard_route.h"

namespace tandem::gpu::fused {

class ShardCourier {
 public:
  static constexpr int kAtOnce = ShardRoute::kPieceBytes / (32 * 16);  // packs that a lane holds

  __device__ explicit ShardCourier(ShardRoute const& route) : route_(route) {}

  __device__ static uint64_t this_epoch(const uint64_t* epoch) {
    return *static_cast<const volatile uint64_t*>(epoch) + 1;
  }

  /// By one thread of the grid: what the peers send now overwrites nothing that is still read.
  __device__ void enter() const {
    const uint64_t epoch = this_epoch(route_.epoch);
    asm volatile("fence.acq_rel.sys;" ::: "memory");
#pragma unroll
    for (int stop = 0; stop < kMaxGpus; ++stop) {
      if (stop >= route_.stops) break;
      asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(route_.enter[stop]), "l"(epoch)
                   : "memory");
    }
  }

  /// By one warp of every block, once in a call.
  __device__ void carry(int lane) const {
    const int blocks = int(gridDim.x * gridDim.y);
    const int block = int(blockIdx.x + gridDim.x * blockIdx.y);
    const uint64_t epoch = this_epoch(route_.epoch);
#pragma unroll 1
    for (int first = 0; first < route_.stops; first += route_.at_once) {
      const int last = min(first + route_.at_once, route_.stops);
      const int mine = first + lane;  // the stop that this lane waits for and signals to
      if (mine < last) {
        wait_signal(of_stop(route_.entered, mine), epoch, route_.watch, OpId::ag_gemm,
                    of_stop(route_.rank_of, mine));
      }
      __syncwarp();
      const unsigned interval = pause(blocks, last - first);
      // Blocks send one after another, so that none of them meets a full wire.
      uint64_t next = nanoseconds() + interval / unsigned(blocks) * unsigned(block);
      int row = block;
#pragma unroll 1
      for (int chunk = 0; chunk < route_.chunks; ++chunk) {
        unsigned carried = 0;
#pragma unroll 1
        for (; row < route_.rows; row += blocks) {
          carry_piece(row, chunk * ShardRoute::kPieceBytes + lane * 16, first, last, next);
          next += interval;
          ++carried;
        }
        row -= route_.rows;
        __syncwarp();
        if (carried > 0 && mine < last) add_signal(of_stop(route_.arrived, mine) + chunk, carried);
      }
    }
    __syncwarp();
    if (lane == 0) count(2 * unsigned(blocks));
  }

  /// By each of the `readers` warps of the grid that read the epoch, once it has: the last one
  /// advances it.
  __device__ void count(unsigned readers) const {
    if (atomicAdd(route_.done, 1u) != readers - 1) return;
    *route_.done = 0;
    *route_.epoch += 1;
  }

 private:
  // Indexing the kernel's parameters by a variable would copy them to every thread's stack.
  template <class T>
  __device__ static T of_stop(T const (&values)[kMaxGpus], int stop) {
    T value = values[0];
#pragma unroll
    for (int s = 1; s < kMaxGpus; ++s) value = s == stop ? values[s] : value;
    return value;
  }

  // From one piece of a block to its next, in ns.
  __device__ unsigned pause(int blocks, int stops) const {
    if (route_.bytes_per_ns == 0) return 0;
    return unsigned(ShardRoute::kPieceBytes * stops * blocks) / unsigned(route_.bytes_per_ns);
  }

  // Of `row`, from byte `column` on every lane; not before `when`.
  __device__ void carry_piece(int row, int column, int first, int last, uint64_t when) const {
    const int64_t at = int64_t(row) * route_.row_bytes + column;
    const int left = route_.row_bytes - column;
    uint4 packs[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i * 512 < left) {
        packs[i] = __ldcg(reinterpret_cast<const uint4*>(route_.from + at + i * 512));
      }
    }
    while (int64_t(nanoseconds() - when) < 0) __nanosleep(40);
#pragma unroll
    for (int stop = 0; stop < kMaxGpus; ++stop) {
      if (stop < first || stop >= last) continue;
      std::byte* to = route_.to[stop] + at;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i * 512 < left) store(to + i * 512, packs[i]);
      }
    }
  }

  // In program order with the pauses between them.
  __device__ static void store(std::byte* to, uint4 const& pack) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(pack.x), "r"(pack.y),
                 "r"(pack.z), "r"(pack.w)
                 : "memory");
  }

  // Everything that the warp stored before is visible first.
  __device__ static void add_signal(uint64_t* signal, unsigned parts) {
    asm volatile("fence.acq_rel.sys;\n\tred.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(signal),
                 "l"(uint64_t(parts))
                 : "memory");
  }

  ShardRoute const& route_;
};

}  // namespace tandem::gpu::fused
