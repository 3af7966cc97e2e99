// Attention of many single rows over pages on Hopper. A row's keys are divided into splits of
// kSplitPages pages. Two blocks on each SM take the splits of all rows in turn, for up to eight
// query heads that share a key head: one warp loads pages ahead, also those of the next splits, and
// four multiply. The last block to end a split of a row adds the sums of all its splits in order,
// so its bits depend on the row only, whichever blocks take its splits.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>

#include "core/cuda/check.h"
#include "core/cuda/early_start.cuh"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/paged.cuh"
#include "kernels/cuda/sm90/attention.cuh"
#include "kernels/cuda/sm90/single_kernels.h"
#include "kernels/cuda/sm90/single_loader.cuh"

namespace tandem::gpu::sm90 {
namespace {

/// The multiplying warps. Scores are keys x queries^T, of which a warp has 16 keys; sums are
/// values^T x weights, of which it has a quarter of the elements.
template <int kHead, int kStages>
class SingleMultiplier {
  using Memory = SingleShared<kHead, kStages>;
  static constexpr int kTiles = kHead / kSingleWarps / 16;
  static constexpr int kLaneElements = kHead / 32;

 public:
  __device__ SingleMultiplier(const SingleParams& p, Memory& shared)
      : p_(p), shared_(shared), warp_(int(threadIdx.x) / 32 - 1), lane_(int(threadIdx.x) % 32) {}

  __device__ void run() {
    while (true) {
      shared_.full[stage_.index].wait(stage_.phase);
      const PageWork work = shared_.work[stage_.index];
      if (work.row < 0) return;
      if (work.splits == 0) {
        release();
        clear(work);
        continue;
      }
      if (work.is_first) begin();
      add_page(work);
      release();
      if (work.is_last) end(work);
    }
  }

 private:
  __device__ static void wait_for_warps() {
    asm volatile("bar.sync 1, %0;" ::"n"(32 * kSingleWarps) : "memory");
  }
  __device__ void release() {
    __syncwarp();
    if (lane_ == 0) shared_.empty[stage_.index].arrive();
    stage_.advance();
  }

  __device__ void clear(const PageWork& work) const {
    __nv_bfloat16* const out = p_.out + work.row * p_.stride + int64_t(work.head) * kHead;
    for (int i = warp_ * 32 + lane_; i < work.heads * kHead / 2; i += 32 * kSingleWarps) {
      reinterpret_cast<uint32_t*>(out)[i] = 0;
    }
  }

  __device__ void begin() {
    const auto& q = shared_.q[stage_.index];
#pragma unroll
    for (int i = 0; i < kHead / 16; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        query_[i][half] =
            *reinterpret_cast<const uint32_t*>(&q[lane_ / 4][i * 16 + half * 8 + lane_ % 4 * 2]);
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) top_[c] = -INFINITY, total_[c] = 0;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (float& value : sum_[i]) value = 0;
    }
  }

  __device__ void add_page(const PageWork& work) {
    const int matrix = lane_ / 8, matrix_row = lane_ % 8;  // whose address this lane passes
    const auto* const keys = shared_.k[stage_.index];
    float score[2][4] = {};
#pragma unroll
    for (int i = 0; i < kHead / 16; ++i) {
      uint32_t a[4];
      load_tile(a, page_vector(keys, warp_ * kWarpKeys + matrix % 2 * 8 + matrix_row,
                               i * 2 + matrix / 2));
      multiply_tile(score[i % 2], a, query_[i]);
    }
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = warp_ * kWarpKeys + lane_ / 4 + e / 2 * 8;
      const float sum = (score[0][e] + score[1][e]) * p_.scale_log2;
      score[0][e] = key >= work.begin && key < work.end ? sum : -INFINITY;
      top[e % 2] = fmaxf(top[e % 2], score[0][e]);
    }
    float keep[2];
    find_tops(top, keep);
    float weight[4];
#pragma unroll
    for (int c = 0; c < 2; ++c) total_[c] *= keep[c];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      weight[e] = exp2_of(score[0][e] - top_[e % 2]);
      total_[e % 2] += weight[e];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<uint32_t*>(
          &shared_.weights[lane_ / 4][warp_ * kWarpKeys + half * 8 + lane_ % 4 * 2]) =
          transposed(packed(weight[2 * half], weight[2 * half + 1]));
    }
    wait_for_warps();
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum_[i][e] *= keep[e % 2];
    }
    if (work.begin == 0 && work.end == kSinglePage) {
      add_values<false>(work);
    } else {
      add_values<true>(work);
    }
  }

  /// Finds the largest scores of all warps, and factors of sums so far.
  __device__ void find_tops(const float (&top)[2], float (&keep)[2]) {
    float of_warp[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) of_warp[c] = combine_rows(top[c], Larger{});
    if (lane_ < 4) {
      *reinterpret_cast<float2*>(&shared_.tops[warp_][2 * lane_]) =
          make_float2(of_warp[0], of_warp[1]);
    }
    wait_for_warps();
    float2 all = make_float2(top_[0], top_[1]);
#pragma unroll
    for (int w = 0; w < kSingleWarps; ++w) {
      const float2 other = *reinterpret_cast<const float2*>(&shared_.tops[w][lane_ % 4 * 2]);
      all.x = fmaxf(all.x, other.x), all.y = fmaxf(all.y, other.y);
    }
    keep[0] = exp2_of(top_[0] - all.x), keep[1] = exp2_of(top_[1] - all.y);
    top_[0] = all.x, top_[1] = all.y;
  }

  /// `kMasked`: keys of the page that are not read may have values that are no numbers.
  template <bool kMasked>
  __device__ void add_values(const PageWork& work) {
    const int matrix = lane_ / 8, matrix_row = lane_ % 8;
    const auto* const values = shared_.v[stage_.index];
#pragma unroll
    for (int t = 0; t < kSinglePage / 16; ++t) {
      uint32_t weights[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weights[half] = *reinterpret_cast<const uint32_t*>(
            &shared_.weights[lane_ / 4][t * 16 + half * 8 + lane_ % 4 * 2]);
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        uint32_t a[4];
        load_transposed_tile(a, page_vector(values, t * 16 + matrix / 2 * 8 + matrix_row,
                                            (warp_ * kTiles + i) * 2 + matrix % 2));
        if constexpr (kMasked) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = t * 16 + half * 8 + lane_ % 4 * 2;
            const auto read = [&](int k) { return k >= work.begin && k < work.end; };
            const uint32_t mask = (read(key) ? 0xffffu : 0) | (read(key + 1) ? 0xffff0000u : 0);
            a[2 * half] &= mask, a[2 * half + 1] &= mask;
          }
        }
        multiply_tile(sum_[i], a, weights);
      }
    }
  }

  __device__ void end(const PageWork& work) {
    float of_warp[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) of_warp[c] = combine_rows(total_[c], Plus{});
    if (lane_ < 4) {
      *reinterpret_cast<float2*>(&shared_.totals[warp_][2 * lane_]) =
          make_float2(of_warp[0], of_warp[1]);
    }
    wait_for_warps();
    float total[2] = {0, 0};
#pragma unroll
    for (int w = 0; w < kSingleWarps; ++w) {
      const float2 other = *reinterpret_cast<const float2*>(&shared_.totals[w][lane_ % 4 * 2]);
      total[0] += other.x, total[1] += other.y;
    }
    const bool is_whole = work.splits == 1;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int head = lane_ % 4 * 2 + c;
      if (head >= work.heads) continue;
      const float scale = 1 / total[c];
      const int64_t partial =
          (int64_t(work.row) * p_.heads + work.head + head) * p_.splits + work.split;
      if (!is_whole && warp_ == 0 && lane_ < 4) {
        *reinterpret_cast<float2*>(p_.scales + 2 * partial) = make_float2(top_[c], total[c]);
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int element = (warp_ * kTiles + i) * 16 + half * 8 + lane_ / 4;
          const float sum = sum_[i][2 * half + c];
          if (is_whole) {
            p_.out[work.row * p_.stride + int64_t(work.head + head) * kHead + element] =
                __float2bfloat16(sum * scale);
          } else {
            p_.sums[partial * kHead + element] = sum;
          }
        }
      }
    }
    if (!is_whole) count(work);
  }

  /// Counts the split; adds those of the row if it was the last.
  __device__ void count(const PageWork& work) {
    wait_for_warps();
    if (warp_ == 0 && lane_ == 0) {
      const int blocks = p_.kv_heads * blocks_of_group(p_.heads / p_.kv_heads);
      int* const counter = p_.counters + work.row * blocks + work.block;
      __threadfence();
      shared_.ends_row = atomicAdd(counter, 1) == work.splits - 1;
      __threadfence();
      if (shared_.ends_row) *counter = 0;
    }
    wait_for_warps();
    if (!shared_.ends_row) return;
    for (int head = warp_; head < work.heads; head += kSingleWarps) add_splits(work, head);
  }

  /// Adds the splits of a head in order.
  __device__ void add_splits(const PageWork& work, int head) const {
    const int64_t first = (int64_t(work.row) * p_.heads + work.head + head) * p_.splits;
    const auto* const scales = reinterpret_cast<const float2*>(p_.scales) + first;
    float top = -INFINITY;
    for (int s = lane_; s < work.splits; s += 32) top = fmaxf(top, __ldcg(scales + s).x);
#pragma unroll
    for (int o = 16; o > 0; o /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float total = 0, sum[kLaneElements] = {};
    for (int base = 0; base < work.splits; base += 32) {
      const int num = min(32, work.splits - base);
      const float2 scale = lane_ < num ? __ldcg(scales + base + lane_) : make_float2(-INFINITY, 0);
      const float weight = exp2_of(scale.x - top);
      total += weight * scale.y;
      const float* const sums = p_.sums + (first + base) * kHead + lane_ * kLaneElements;
      constexpr int kAtOnce = 8;
      for (int s = 0; s < num; s += kAtOnce) {
        float value[kAtOnce][kLaneElements];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          load_sums(value[i], sums + int64_t(min(s + i, num - 1)) * kHead);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float of_split = __shfl_sync(~0u, weight, s + i);  // 0 after the last
#pragma unroll
          for (int e = 0; e < kLaneElements; ++e) sum[e] = fmaf(of_split, value[i][e], sum[e]);
        }
      }
    }
#pragma unroll
    for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(~0u, total, o);
    __nv_bfloat16* const out =
        p_.out + work.row * p_.stride + int64_t(work.head + head) * kHead + lane_ * kLaneElements;
    const float inverse = 1 / total;
#pragma unroll
    for (int e = 0; e < kLaneElements; e += 2) {
      *reinterpret_cast<uint32_t*>(out + e) = packed(sum[e] * inverse, sum[e + 1] * inverse);
    }
  }
  __device__ static void load_sums(float (&to)[4], const float* from) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
  __device__ static void load_sums(float (&to)[2], const float* from) {
    const float2 v = __ldcg(reinterpret_cast<const float2*>(from));
    to[0] = v.x, to[1] = v.y;
  }

  const SingleParams& p_;
  Memory& shared_;
  const int warp_, lane_;
  PipelineState<kStages> stage_;
  uint32_t query_[kHead / 16][2];
  // Heads 2 (lane % 4) and the next; total_ has this lane's keys only.
  float top_[2], total_[2], sum_[kTiles][4];
};

template <int kHead, int kStages, int kBlocks>
__global__ void __launch_bounds__(kSingleThreads, kBlocks)
    single_kernel(const __grid_constant__ SingleParams p) {
  extern __shared__ std::byte memory[];
  using Memory = SingleShared<kHead, kStages>;
  auto& shared = *reinterpret_cast<Memory*>(memory + (1024 - address_of(memory) % 1024) % 1024);
  let_next_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(1), shared.empty[i].init(kSingleWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  wait_for_previous();
  find_splits(p, shared);
  if (threadIdx.x < 32) {
    SingleLoader<kHead, kStages>(p, shared).run();
  } else {
    SingleMultiplier<kHead, kStages>(p, shared).run();
  }
}

template <int kHead, int kStages, int kBlocks>
void launch_with(const SingleParams& p, cudaStream_t stream) {
  constexpr int kBytes = int(sizeof(SingleShared<kHead, kStages>)) + 1024;
  static_assert(kBlocks * (kBytes + 1024) <= 228 * 1024);
  const auto kernel = single_kernel<kHead, kStages, kBlocks>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "paged_attention");
  const int64_t splits =
      int64_t(p.rows) * p.splits * p.kv_heads * blocks_of_group(p.heads / p.kv_heads);
  launch_early("paged_attention", kernel, unsigned(std::min(splits, int64_t(kBlocks) * p.sms)),
               kSingleThreads, size_t(kBytes), stream, true, p);
}

}  // namespace

void launch_singles(int head_dim, const SingleParams& params, CUstream_st* stream) {
  if (head_dim == 64) return launch_with<64, 6, 2>(params, stream);
  launch_with<128, 3, 2>(params, stream);
}

}  // namespace tandem::gpu::sm90
