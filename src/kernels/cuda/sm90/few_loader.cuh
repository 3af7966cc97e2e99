// Loads of the Hopper kernel of attention of few single rows over pages (few_attention.cu): the
// memory of a block, its share of a row's pages, and the warp that loads them.
#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/sm90/few_kernels.h"
#include "kernels/cuda/sm90/single_loader.cuh"

namespace tandem::gpu::sm90 {
namespace {

template <int kHead, int kStages>
struct FewShared {
  static constexpr int kBoxes = kHead / kBoxColumns;
  static constexpr int kPageBytes = kBoxes * kPageBox;  // of keys
  struct Stage {
    alignas(1024) std::byte k[kBoxes][kPageBox];
    alignas(1024) std::byte v[kBoxes][kPageBox];
  };
  struct Sums {
    // Rows padded so that those of a warp's lanes are in all banks.
    alignas(16) float of_warps[kSingleWarps][kSingleHeads][kHead + 4];
    alignas(16) float of_block[kSingleHeads][kHead];
  };
  union {
    Stage stages[kStages];
    Sums sums;  // once all stages are used
  };
  alignas(16) __nv_bfloat16 q[kSingleHeads][kHead + 8];
  alignas(16) __nv_bfloat16 new_key[kHead], new_value[kHead];
  // Largest scores, and sums of weights relative to them.
  alignas(16) float2 scales_of_warps[kSingleWarps][kSingleHeads];
  alignas(16) float2 scales[kSingleHeads];
  FullBarrier full[kStages];
  EmptyBarrier empty[kStages];
};

/// A block's pages of a row, and the query heads of its cluster.
struct FewWork {
  int row, kv_head, rank;  // rank: of the block in its cluster
  int block, head, heads;  // of query heads of the key head; the first
  int sequence, position;
  int first, begin, end;  // key that is read first; pages [begin, end)
  bool has_newest;        // the pages end with that of `position`

  __device__ explicit FewWork(const FewParams& p) {
    const int group = p.heads / p.kv_heads, blocks = blocks_of_group(group);
    const int cluster = int(blockIdx.x) / p.cluster;
    rank = int(blockIdx.x) % p.cluster;
    has_newest = rank == p.cluster - 1;
    block = cluster % blocks, kv_head = cluster / blocks % p.kv_heads;
    row = cluster / (blocks * p.kv_heads);
    head = kv_head * group + block * kSingleHeads;
    heads = min(kSingleHeads, (kv_head + 1) * group - head);
  }
  __device__ void find_pages(const FewParams& p) {
    sequence = p.sequences[row], position = p.positions[row];
    first = first_key(p, position);
    const int first_page = first / kSinglePage, pages = position / kSinglePage + 1 - first_page;
    begin = first_page + pages * rank / p.cluster;
    end = first_page + pages * (rank + 1) / p.cluster;
  }
};

/// Loads the block's pages; called by one warp.
template <int kHead, int kStages>
__device__ void load_pages(const FewParams& p, FewShared<kHead, kStages>& shared,
                           const FewWork& work) {
  using Memory = FewShared<kHead, kStages>;
  constexpr int kBoxes = Memory::kBoxes;
  const int lane = int(threadIdx.x) % 32, box = lane % kBoxes;
  const bool is_key = lane < kBoxes;
  const int32_t* const line = p.pages + work.sequence * p.pages_of_line;
  PipelineState<kStages> state;
  int numbers = 0;  // of 32 pages, one in each lane
  for (int page = work.begin; page < work.end; ++page) {
    const int i = (page - work.begin) % 32;
    if (i == 0) numbers = page + lane < work.end ? line[page + lane] : 0;
    const int number = __shfl_sync(~0u, numbers, i);
    shared.empty[state.index].wait(state.phase ^ 1);
    __syncwarp();
    FullBarrier& full = shared.full[state.index];
    if (lane == 0) full.arrive_and_expect_tx(2 * Memory::kPageBytes);
    __syncwarp();
    if (lane < 2 * kBoxes) {
      auto& stage = shared.stages[state.index];
      cute::SM90_TMA_LOAD_3D::copy(is_key ? &p.keys : &p.values, reinterpret_cast<uint64_t*>(&full),
                                   uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                   is_key ? stage.k[box] : stage.v[box],
                                   work.kv_head * kHead + box * kBoxColumns, 0, number);
    }
    __syncwarp();
    state.advance();
  }
}

}  // namespace
}  // namespace tandem::gpu::sm90
