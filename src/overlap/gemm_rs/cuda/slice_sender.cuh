// Blocks of adding.h's kernel that have no part in the product: they take what is sent from the
// outbox, a slice at a time, in the order in which it is computed, and tell its owner when it has
// arrived. One thread of every warp that has a place in shared memory does, by bulk copies.
//
// A place is filled again as soon as it has been read, and what a slice asks for beside its bytes
// is done while another one is on its way.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "comm/nccl/device_signal.cuh"
#include "overlap/gemm_rs/cuda/adding.h"
#include "schedule/rs_piece_order.h"

namespace tandem::gpu::fused {

/// What blocks send.
struct Outgoing {
  int senders = 0;  ///< blocks
  int slices_of_shard = 0, count = 0;
  const schedule::Slice* order = nullptr;  ///< `count`, as they leave
  uint64_t* computed = nullptr;            ///< epochs, by step of the ring and then by slice
};

/// The epoch of this call.
__device__ inline uint64_t epoch_of(const AddingJob& job) {
  return *static_cast<const volatile uint64_t*>(job.epoch) + 1;
}

struct SliceSender {
  static constexpr int kPlaces = 7;
  static constexpr int kSliceBytes = AddingKernel::kSliceRows * AddingKernel::kColumns * 2;
  using Full = cutlass::arch::ClusterTransactionBarrier;

  struct Shared {
    alignas(128) std::byte place[kPlaces][kSliceBytes];
    Full full[kPlaces];
  };

  /// By all threads of sender `number`. When a wait gives up, its warp sends nothing more, and who
  /// waits for that says so.
  __device__ static void run(const Outgoing& outgoing, const AddingJob& job, Shared& shared,
                             int number) {
    const int warp = int(threadIdx.x) / 32;
    if (warp < kPlaces && cute::elect_one_sync()) {
      // What is ready at one time is spread over all blocks.
      send(outgoing, job, shared.place[warp], shared.full[warp], warp * outgoing.senders + number);
    }
    __syncthreads();
  }

 private:
  __device__ static void send(const Outgoing& outgoing, const AddingJob& job, std::byte* place,
                              Full& full, int first) {
    const PeerTable& staging = job.staging;
    const uint64_t epoch = epoch_of(job);
    const int stride = outgoing.senders * kPlaces;
    full.init(1);
    cutlass::arch::fence_barrier_init();
    cutlass::arch::fence_view_async_shared();
    uint32_t phase = 0;
    unsigned entered = 0;           // owners seen to have entered this call, by bit
    uint64_t* under_way = nullptr;  // who is told when what was sent last has arrived
    const auto finish = [&] {
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      if (under_way) release_signal(under_way, epoch);
      under_way = nullptr;
    };
    // The owner knows this rank by the step.
    const auto number_of = [&](const schedule::Slice& slice) {
      return int64_t(slice.step) * outgoing.slices_of_shard + slice.number;
    };
    schedule::Slice next{};
    bool is_ready = false;
    const auto look_at = [&](int at) {
      if (at >= outgoing.count) return;
      next = outgoing.order[at];
      is_ready = acquire_signal(outgoing.computed + number_of(next)) >= epoch;
    };
    look_at(first);
#pragma unroll 1
    for (int at = first; at < outgoing.count; at += stride) {
      const schedule::Slice slice = next;
      const int owner = schedule::rs_owner(staging.rank, staging.size, slice.step);
      const int64_t number = number_of(slice);
      // What was sent before is not kept waiting.
      if (!(entered >> owner & 1) || !is_ready) finish();
      if (!(entered >> owner & 1)) {
        const uint64_t* flag = staging.signals[staging.rank] + job.entered + owner;
        if (!wait_signal(flag, epoch, job.watch, OpId::gemm_rs, owner)) break;
        entered |= 1u << owner;
      }
      if (!is_ready && !wait_signal(outgoing.computed + number, epoch, patient(job.watch),
                                    OpId::gemm_rs, staging.rank, slice.number)) {
        break;
      }
      asm volatile("fence.proxy.async;" ::: "memory");
      cute::tma_store_wait<0>();  // the place has been read
      full.arrive_and_expect_tx(kSliceBytes);
      cute::SM90_BULK_COPY_G2S::copy(
          static_cast<const std::byte*>(job.outbox) +
              (int64_t(owner) * outgoing.slices_of_shard + slice.number) * kSliceBytes,
          reinterpret_cast<uint64_t*>(&full), place, kSliceBytes);
      look_at(at + stride);
      full.wait(phase);
      phase ^= 1;
      cute::SM90_BULK_COPY_S2G::copy(place, staging.memory[owner] + number * kSliceBytes,
                                     kSliceBytes);
      cute::tma_store_arrive();
      // All but this one.
      asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
      if (under_way) release_signal(under_way, epoch);
      under_way = staging.signals[owner] + job.landed + number;
    }
    finish();
  }
};

}  // namespace tandem::gpu::fused
