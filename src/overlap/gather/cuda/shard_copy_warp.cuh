// Copy warps of a persistent kernel: a warp of every block copies its chunks of the local shard
// (schedule/ag_copy_order.h) into the peers' gathered buffers at the link's rate, while the
// other warps multiply: cp.async into shared memory, once for all peers and several chunks ahead,
// then ordinary stores. One fence covers a block's stores of a chunk, and stalls the warp until all
// of it has arrived; another group of blocks sends meanwhile.
//
// A copy warp has no other warp to hide its latency, and each of its instructions waits for the one
// before: the instruction count per chunk limits its rate.
#pragma once

#include <cutlass/cutlass.h>

#include <cute/arch/util.hpp>

#include "comm/device/device_signal.cuh"
#include "overlap/contract/cuda/wait_ids.h"
#include "overlap/gather/cuda/shard_route.h"
#include "schedule/ag_copy_order.h"

namespace tandem::gpu::fused {

class ShardCopyWarp {
  static constexpr int kItemBytes = kCopyItemBytes;

 public:
  /// Chunks read ahead of their store, a power of two: 8 KiB of shared memory. With fewer, a block
  /// would wait for reads between its sends, which are some 300 ns apart (one peer, 44 of 132
  /// blocks sending).
  static constexpr int kAhead = 4;
  /// Warps of a block that read the epoch: the loading warp and the copy warp.
  static constexpr unsigned kReadersPerBlock = 2;

  /// Lives in shared memory. A lane writes and reads only its own 16-byte vectors.
  struct Storage {
    alignas(16) std::byte buffers[kAhead][kItemBytes];
  };

  using Route = ShardRoute;
  CUTLASS_DEVICE explicit ShardCopyWarp(Route const& route) : route_(route) {}

  /// Called by one thread of the grid: peers may then send, as nothing they overwrite is still
  /// read.
  CUTLASS_DEVICE void enter() const {
    const uint64_t epoch = this_epoch(route_.calls);
    // release_signal() for all targets, with a single fence.
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    CUTLASS_PRAGMA_UNROLL
    for (int stop = 0; stop < kMaxGpus; ++stop) {
      if (stop >= route_.targets) break;
      asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(route_.enter[stop]), "l"(epoch)
                   : "memory");
    }
  }

  /// Called by one thread of each of the grid's `readers` warps that read the epoch, after its
  /// read.
  CUTLASS_DEVICE void finish_epoch_read(unsigned readers) const {
    gpu::finish_epoch_read(route_.calls, readers);
  }

  /// Called by one warp of every block, once per call.
  CUTLASS_DEVICE void carry(int lane, Storage& storage) const {
    const schedule::CopyAssignment assignment =
        schedule::assignment_of({route_.rows, route_.chunks, blocks(), route_.groups}, block());
    // Time to send a chunk to one target, in units of 1/65536 ns.
    const unsigned pace = (unsigned(kItemBytes) << 16) / unsigned(route_.bytes_per_ns);
    const uint32_t local = cute::cast_smem_ptr_to_uint(storage.buffers[0]) + uint32_t(lane) * 16;
    uint32_t begin = 0;
    // Sends all chunks to targets [first, end).
    int first = 0, end = route_.first_alone ? 1 : route_.targets;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; first < route_.targets; first = end, end = route_.targets) {
      const unsigned pace_of_all = pace * unsigned(end - first);
      schedule::CopyItem to_fetch = assignment.first, to_send = assignment.first;
      unsigned rows_of_chunk = 0;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = -kAhead; step < assignment.num_items; ++step) {
        const uint32_t buffer = local + uint32_t(step & (kAhead - 1)) * kItemBytes;
        if (step == 0 && first == 0) {
          // A late peer may still read the last call's data: nothing is sent.
          if (!wait_for_targets(lane)) return finish(lane);
          send_scales(assignment, lane);
          begin = timer_word();
        }
        if (step >= 0) {
          asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
          const uint32_t due =
              begin + after(schedule::items_before(assignment, to_send), pace_of_all);
          while (int32_t(timer_word() - due) < 0) __nanosleep(40);  // about the timer's resolution
          send(to_send, lane, buffer, first, end);
          ++rows_of_chunk;
          if (schedule::ends_chunk(assignment, to_send)) {
            __syncwarp();
            if (lane >= first && lane < end) {
              // Ordered after all stores of the warp.
              release_add(route_.arrived[lane] + to_send.chunk, rows_of_chunk);
            }
            rows_of_chunk = 0;
          }
          to_send = schedule::next_item(assignment, to_send);
        }
        if (step + kAhead < assignment.num_items) fetch(to_fetch, lane, buffer);
        asm volatile("cp.async.commit_group;" ::: "memory");
        to_fetch = schedule::next_item(assignment, to_fetch);
      }
      begin += after(assignment.rows * route_.chunks, pace_of_all);
    }
    finish(lane);
  }

 protected:
  CUTLASS_DEVICE void finish(int lane) const {
    __syncwarp();
    if (lane == 0) finish_epoch_read(kReadersPerBlock * unsigned(blocks()));
  }

  CUTLASS_DEVICE static int blocks() { return int(gridDim.x * gridDim.y); }
  CUTLASS_DEVICE static int block() { return int(blockIdx.x + gridDim.x * blockIdx.y); }
  // Called by a warp; each lane waits for the target with its index.
  CUTLASS_DEVICE bool wait_for_targets(int lane) const {
    bool came = true;
    if (lane < route_.targets) {
      came = wait_signal(route_.ready_flags[lane], this_epoch(route_.calls), route_.deadline,
                         kAgGemmWait, route_.rank_of[lane]);
    }
    return __all_sync(0xffffffff, came);
  }

 private:
  static constexpr int kVecs = kItemBytes / (32 * 16);  // per lane
  static constexpr int kAtOnce = 2;                     // held at once per lane: registers are few
  static_assert((kAhead & (kAhead - 1)) == 0 && kVecs % kAtOnce == 0);

  CUTLASS_DEVICE static uint32_t after(int items, unsigned pace) {
    return uint32_t(uint64_t(unsigned(items)) * pace >> 16);
  }

  // Offset of a lane's first vector. A shard has less than 4 GiB.
  CUTLASS_DEVICE uint32_t offset_of(schedule::CopyItem item, int lane) const {
    return uint32_t(item.row) * uint32_t(route_.row_bytes) +
           uint32_t(item.chunk * kItemBytes + lane * 16);
  }
  // Bytes of a row from the lane's first vector to its end: only a row's last chunk may be shorter.
  CUTLASS_DEVICE int left_of(schedule::CopyItem item, int lane) const {
    return route_.row_bytes - item.chunk * kItemBytes - lane * 16;
  }

  CUTLASS_DEVICE void fetch(schedule::CopyItem item, int lane, uint32_t buffer) const {
    const std::byte* from = route_.from + offset_of(item, lane);
    const int left = left_of(item, lane);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVecs; ++i) {
      if (i * 512 < left) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(buffer + i * 512),
                     "l"(from + i * 512)
                     : "memory");
      }
    }
  }

  CUTLASS_DEVICE void send(schedule::CopyItem item, int lane, uint32_t buffer, int first,
                           int end) const {
    const uint32_t at = offset_of(item, lane);
    const int left = left_of(item, lane);
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < kVecs; half += kAtOnce) {
      uint4 vecs[kAtOnce];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) vecs[i] = load(buffer + (half + i) * 512);
      CUTLASS_PRAGMA_UNROLL
      for (int stop = 0; stop < kMaxGpus; ++stop) {
        if (stop >= end) break;
        if (stop < first) continue;
        store(route_.to[stop] + at + half * 512, left - half * 512, vecs[0], vecs[1]);
      }
    }
  }

  // Sends the scales of the rows whose first chunk this block copies, to all targets.
  CUTLASS_DEVICE void send_scales(schedule::CopyAssignment const& assignment, int lane) const {
    if (route_.scales == nullptr || assignment.first.chunk != 0) return;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int row = assignment.first.row + lane * assignment.members; row < assignment.rows;
         row += 32 * assignment.members) {
      const float scale = route_.scales[row];
      CUTLASS_PRAGMA_NO_UNROLL
      for (int stop = 0; stop < route_.targets; ++stop) {
        reinterpret_cast<float*>(route_.to[stop] + route_.scales_at)[row] = scale;
      }
    }
  }

  CUTLASS_DEVICE static uint4 load(uint32_t shared) {
    uint4 vec;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vec.x), "=r"(vec.y), "=r"(vec.z), "=r"(vec.w)
                 : "r"(shared)
                 : "memory");
    return vec;
  }

  // Stores two vectors, as far as `left` bytes allow. One statement, so that they share their
  // address.
  CUTLASS_DEVICE static void store(std::byte* to, int left, uint4 const& one, uint4 const& two) {
    asm volatile(
        "{\n\t.reg .pred p, q;\n\t"
        "setp.gt.s32 p, %1, 0;\n\tsetp.gt.s32 q, %1, 512;\n\t"
        "@p st.global.v4.u32 [%0], {%2, %3, %4, %5};\n\t"
        "@q st.global.v4.u32 [%0 + 512], {%6, %7, %8, %9};\n\t}" ::"l"(to),
        "r"(left), "r"(one.x), "r"(one.y), "r"(one.z), "r"(one.w), "r"(two.x), "r"(two.y),
        "r"(two.z), "r"(two.w)
        : "memory");
  }

  ShardRoute const& route_;
};

}  // namespace tandem::gpu::fused
