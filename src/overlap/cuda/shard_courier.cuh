// The couriers of a persistent kernel: a warp of every block carries its pieces of the own shard
// (schedule/ag_courier_order.h) into the peers' gathered buffers at the pace of the wire, while the
// others multiply. A piece is read once for all peers. There are two kinds of them: StoreCourier
// and BulkCourier.
#pragma once

#include <cutlass/cutlass.h>

#include "comm/nccl/device_signal.cuh"
#include "overlap/cuda/shard_route.h"
#include "schedule/ag_courier_order.h"

namespace tandem::gpu::fused {

/// What both kinds do.
class ShardCourier {
 public:
  CUTLASS_DEVICE explicit ShardCourier(ShardRoute const& route) : route_(route) {}

  /// By one thread of the grid: what the peers send now overwrites nothing that is still read.
  CUTLASS_DEVICE void enter() const {
    const uint64_t epoch = this_epoch();
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    CUTLASS_PRAGMA_UNROLL
    for (int stop = 0; stop < kMaxGpus; ++stop) {
      if (stop >= route_.stops) break;
      asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(route_.enter[stop]), "l"(epoch)
                   : "memory");
    }
  }

  /// By each of the `readers` warps of the grid that read the epoch, once it has: the last one
  /// advances it.
  CUTLASS_DEVICE void count(unsigned readers) const {
    if (atomicAdd(route_.done, 1u) != readers - 1) return;
    *route_.done = 0;
    *route_.epoch += 1;
  }

 protected:
  CUTLASS_DEVICE static int blocks() { return int(gridDim.x * gridDim.y); }
  CUTLASS_DEVICE static int block() { return int(blockIdx.x + gridDim.x * blockIdx.y); }
  CUTLASS_DEVICE uint64_t this_epoch() const {
    return *static_cast<const volatile uint64_t*>(route_.epoch) + 1;
  }

  // Indexing the kernel's parameters by a variable would copy them to every thread's stack.
  template <class T>
  CUTLASS_DEVICE static T of_stop(T const (&values)[kMaxGpus], int stop) {
    T value = values[0];
    CUTLASS_PRAGMA_UNROLL
    for (int s = 1; s < kMaxGpus; ++s) value = s == stop ? values[s] : value;
    return value;
  }

  // By a warp, whose every lane waits for the stop of its number.
  CUTLASS_DEVICE void wait_for_stops(int lane) const {
    if (lane < route_.stops) {
      wait_signal(of_stop(route_.entered, lane), this_epoch(), route_.watch, OpId::ag_gemm,
                  of_stop(route_.rank_of, lane));
    }
    __syncwarp();
  }

  // From one piece of a block to its next, in ns.
  CUTLASS_DEVICE unsigned pause(int piece_bytes) const {
    return unsigned(piece_bytes * route_.stops * blocks()) / unsigned(route_.bytes_per_ns);
  }
  // Blocks send one after another, so that none of them meets a full wire.
  CUTLASS_DEVICE static uint64_t first_time(unsigned pause) {
    return nanoseconds() + pause / unsigned(blocks()) * unsigned(block());
  }

  ShardRoute const& route_;
};

}  // namespace tandem::gpu::fused
