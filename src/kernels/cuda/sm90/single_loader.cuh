// Loads of the Hopper kernel of attention of single rows over pages (single_attention.cu): the
// order of the splits, the memory of a block, and the warp that loads pages.
#pragma once

#include <cuda_bf16.h>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/cuda/sm90/attention.cuh"
#include "kernels/cuda/sm90/single_kernels.h"

namespace tandem::gpu::sm90 {
namespace {

constexpr int kSingleWarps = 4;  // that multiply
constexpr int kSingleThreads = 32 * (kSingleWarps + 1);
constexpr int kWarpKeys = kSinglePage / kSingleWarps;
constexpr int kPageBox = kSinglePage * kRowBytes;
static_assert(kWarpKeys == 16 && kSplitPages <= 32);

/// A page of a split.
struct PageWork {
  int row;          // -1: the end
  int block, head;  // of query heads; the first
  int heads;
  int begin, end;          // keys of the page that are read
  int split, splits;       // of the row; 0 splits: it is none, and its heads are cleared
  bool is_first, is_last;  // of the split
};

template <int kHead, int kStages>
struct SingleShared {
  static constexpr int kBoxes = kHead / kBoxColumns;
  static constexpr int kPageBytes = kBoxes * kPageBox;  // of keys
  alignas(1024) std::byte k[kStages][kBoxes][kPageBox];
  alignas(1024) std::byte v[kStages][kBoxes][kPageBox];
  // Rows padded so that those of one column are in all banks.
  alignas(16) __nv_bfloat16 q[kStages][kSingleHeads][kHead + 8];
  alignas(16) __nv_bfloat16 weights[kSingleHeads][kSinglePage + 8];
  alignas(16) float tops[kSingleWarps][kSingleHeads], totals[kSingleWarps][kSingleHeads];
  FullBarrier full[kStages];
  EmptyBarrier empty[kStages];
  PageWork work[kStages];
  bool ends_row;
  int begins[kSingleRows + 1];  // splits of the rows before
  int sequences[kSingleRows], positions[kSingleRows];
};

/// Address of 16 bytes of a key or value of a page.
template <class Byte>
__device__ Byte* page_vector(Byte (*boxes)[kPageBox], int key, int index) {
  return boxes[index / 8] + key * kRowBytes + ((index % 8) ^ (key % 8)) * 16;
}
/// First key that the query at a position reads.
template <class Params>
__device__ int first_key(const Params& p, int position) {
  return p.window > 0 ? max(0, position + 1 - p.window) : 0;
}
/// Split of a row's first key, and the number of its splits from there on.
struct RowSplits {
  int first, count;
  __device__ RowSplits(const SingleParams& p, int position)
      : first(first_key(p, position) / kSplitKeys), count(position / kSplitKeys + 1 - first) {}
};

/// Finds the rows' splits; all threads of a block.
template <class Memory>
__device__ void find_splits(const SingleParams& p, Memory& shared) {
  for (int row = int(threadIdx.x); row < p.rows; row += kSingleThreads) {
    const int sequence = p.sequences[row], position = p.positions[row];
    shared.sequences[row] = sequence, shared.positions[row] = position;
    shared.begins[row + 1] = sequence < 0 ? 1 : RowSplits(p, position).count;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = int(threadIdx.x), rows = (p.rows + 31) / 32;
    const int begin = lane * rows, end = min(begin + rows, p.rows);
    int count = 0;
    for (int row = begin; row < end; ++row) count += shared.begins[row + 1];
    int before = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(~0u, before, offset);
      if (lane >= offset) before += other;
    }
    before -= count;
    if (lane == 0) shared.begins[0] = 0;
    for (int row = begin; row < end; ++row) {
      before += shared.begins[row + 1];
      shared.begins[row + 1] = before;
    }
  }
  __syncthreads();
}

/// The loading warp.
template <int kHead, int kStages>
class SingleLoader {
  using Memory = SingleShared<kHead, kStages>;
  static constexpr int kBoxes = Memory::kBoxes;

 public:
  __device__ SingleLoader(const SingleParams& p, Memory& shared)
      : p_(p),
        shared_(shared),
        lane_(int(threadIdx.x) % 32),
        group_(p.heads / p.kv_heads),
        blocks_(blocks_of_group(group_)) {}

  __device__ void run() {
    const int blocks = p_.kv_heads * blocks_, count = shared_.begins[p_.rows] * blocks;
    const int step = int(gridDim.x);
    for (int base = int(blockIdx.x); base < count; base += 32 * step) {
      // A lane finds one of the next splits.
      const int index = min(base + lane_ * step, count - 1), split = index / blocks;
      int row = 0;
      for (int width = kSingleRows; width > 0; width /= 2) {
        if (row + width < p_.rows && shared_.begins[row + width] <= split) row += width;
      }
      const int local = split - shared_.begins[row], block = index % blocks;
      const int num = min(32, (count - base + step - 1) / step);
      Split next(*this, row, local, block, 0);
      int next_page = page_number(next);
      for (int i = 0; i < num; ++i) {
        const Split now = next;
        const int page = next_page;
        if (i + 1 < num) {
          next = Split(*this, row, local, block, i + 1);
          next_page = page_number(next);
        }
        load_split(now, page);
      }
    }
    begin_stage();
    if (lane_ == 0) {
      shared_.work[stage_.index].row = -1;
      shared_.full[stage_.index].arrive();
    }
  }

 private:
  struct Split {
    int row, block, sequence, position, split, splits, first, first_page, last_page;
    __device__ Split(const SingleLoader& loader, int rows, int locals, int blocks, int lane)
        : row(__shfl_sync(~0u, rows, lane)),
          block(__shfl_sync(~0u, blocks, lane)),
          sequence(loader.shared_.sequences[row]),
          position(loader.shared_.positions[row]),
          split(__shfl_sync(~0u, locals, lane)) {
      const RowSplits all(loader.p_, position);
      splits = all.count;
      first = first_key(loader.p_, position);
      first_page = max((all.first + split) * kSplitPages, first / kSinglePage);
      last_page = min((all.first + split + 1) * kSplitPages - 1, position / kSinglePage);
    }
  };
  /// Number of the lane's page of a split.
  __device__ int page_number(const Split& s) const {
    if (s.sequence < 0 || s.first_page + lane_ > s.last_page) return 0;
    return p_.pages[s.sequence * p_.pages_of_line + s.first_page + lane_];
  }
  __device__ void begin_stage() {
    shared_.empty[stage_.index].wait(stage_.phase ^ 1);
    __syncwarp();
  }

  __device__ void load_split(const Split& s, int pages) {
    const int kv_head = s.block / blocks_;
    const int head = kv_head * group_ + s.block % blocks_ * kSingleHeads;
    const int heads = min(kSingleHeads, (kv_head + 1) * group_ - head);
    if (s.sequence < 0) {
      begin_stage();
      if (lane_ == 0) {
        shared_.work[stage_.index] = {s.row, s.block, head, heads, 0, 0, 0, 0, true, true};
        shared_.full[stage_.index].arrive();
      }
      __syncwarp();
      stage_.advance();
      return;
    }
    for (int page = s.first_page; page <= s.last_page; ++page) {
      const int number = __shfl_sync(~0u, pages, page - s.first_page), i = stage_.index;
      const bool is_first = page == s.first_page;
      begin_stage();
      FullBarrier& full = shared_.full[i];
      if (lane_ == 0) {
        const int begin = page * kSinglePage;
        shared_.work[i] = {s.row,
                           s.block,
                           head,
                           heads,
                           max(s.first - begin, 0),
                           min(s.position + 1 - begin, kSinglePage),
                           s.split,
                           s.splits,
                           is_first,
                           page == s.last_page};
        full.arrive_and_expect_tx(2 * Memory::kPageBytes +
                                  (is_first ? heads * kHead * int(sizeof(__nv_bfloat16)) : 0));
      }
      __syncwarp();
      if (lane_ < 2 * kBoxes) {
        const int box = lane_ % kBoxes, column = kv_head * kHead + box * kBoxColumns;
        const bool is_key = lane_ < kBoxes;
        cute::SM90_TMA_LOAD_3D::copy(
            is_key ? &p_.keys : &p_.values, reinterpret_cast<uint64_t*>(&full), kHint,
            is_key ? shared_.k[i][box] : shared_.v[i][box], column, 0, number);
      } else if (is_first && lane_ >= 8 && lane_ < 8 + heads) {
        cute::SM90_BULK_COPY_G2S::copy(
            p_.q + s.row * p_.q_stride + int64_t(head + lane_ - 8) * kHead,
            reinterpret_cast<uint64_t*>(&full), shared_.q[i][lane_ - 8],
            kHead * int(sizeof(__nv_bfloat16)));
      }
      __syncwarp();
      stage_.advance();
    }
  }

  static constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  const SingleParams& p_;
  Memory& shared_;
  const int lane_, group_, blocks_;
  PipelineState<kStages> stage_;
};

}  // namespace
}  // namespace tandem::gpu::sm90
