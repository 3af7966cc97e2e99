// Attention of few single rows over pages on Hopper. A cluster of blocks has the query heads of a
// row that share a key head, up to eight, and each block a share of the row's pages. One warp loads
// pages ahead, and four multiply, each the same 16 keys of every page with a softmax of its own, so
// that they never wait for each other. The warps' sums are added in order, then those of the
// blocks, of which each adds a share of the elements: bits depend on the row's keys and the size of
// the cluster only. With kAppends the kernel rotates q and the new key itself, and the block that
// has the newest position writes the new key and value to their page.
#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include <cmath>

#include "core/cuda/check.h"
#include "core/cuda/early_start.cuh"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/paged.cuh"
#include "kernels/cuda/sm90/attention.cuh"
#include "kernels/cuda/sm90/few_kernels.h"
#include "kernels/cuda/sm90/few_loader.cuh"

namespace tandem::gpu::sm90 {
namespace {

namespace cg = cooperative_groups;

/// Factor of sums relative to `top`, of which there may be none, to those relative to `largest`.
__device__ inline float factor_of(float top, float largest) {
  return top == -INFINITY ? 0 : exp2_of(top - largest);
}

/// sum += factor x value. Products and sums are explicit in this file, so that both forms of the
/// kernel have the same bits.
__device__ inline void add_scaled(float4& sum, float factor, const float4& value) {
  sum.x = __fmaf_rn(factor, value.x, sum.x), sum.y = __fmaf_rn(factor, value.y, sum.y);
  sum.z = __fmaf_rn(factor, value.z, sum.z), sum.w = __fmaf_rn(factor, value.w, sum.w);
}

/// The multiplying warps. Scores are keys x queries^T, sums are values^T x weights.
template <int kHead, int kStages, bool kAppends>
class FewMultiplier {
  using Memory = FewShared<kHead, kStages>;
  using Stage = typename Memory::Stage;
  using Elements = Vector<__nv_bfloat16, 8>;
  static constexpr int kTiles = kHead / 16, kVectors = kHead / 8;

 public:
  __device__ FewMultiplier(const FewParams& p, Memory& shared, const FewWork& work)
      : p_(p),
        shared_(shared),
        work_(work),
        thread_(int(threadIdx.x) - 32),
        warp_(thread_ / 32),
        lane_(thread_ % 32) {}

  __device__ void run() {
    int newest_page = 0;
    if constexpr (kAppends) {
      newest_page = p_.pages[work_.sequence * p_.pages_of_line + work_.position / kSinglePage];
      rotate_heads();
    } else {
      copy_heads();
    }
    wait_for_warps();
    if (kAppends && work_.has_newest && work_.block == 0) append(newest_page);
    begin();
    for (int page = work_.begin; page < work_.end; ++page) {
      shared_.full[state_.index].wait(state_.phase);
      asm volatile("" ::: "memory");
      add_page(shared_.stages[state_.index], page);
      __syncwarp();
      if (lane_ == 0) shared_.empty[state_.index].arrive();
      state_.advance();
    }
    add_warps();
  }

 private:
  __device__ static void wait_for_warps() {
    asm volatile("bar.sync 1, %0;" ::"n"(32 * kSingleWarps) : "memory");
  }

  __device__ void copy_heads() const {
    const __nv_bfloat16* const q = p_.q + work_.row * p_.q_stride + int64_t(work_.head) * kHead;
    for (int i = thread_; i < kSingleHeads * kVectors; i += 32 * kSingleWarps) {
      const int head = i / kVectors, at = i % kVectors * 8;
      Elements value = {};
      if (head < work_.heads) value = load_vector<__nv_bfloat16, 8>(q + head * kHead + at);
      store_vector(&shared_.q[head][at], value);
    }
  }

  /// Rotates queries and the new key; the last warp copies the new value.
  __device__ void rotate_heads() const {
    constexpr int kHalf = kHead / 2, kOfHead = kVectors / 2;
    static_assert((kSingleHeads + 1) * kOfHead <= 32 * (kSingleWarps - 1));
    const int head = thread_ / kOfHead, at = thread_ % kOfHead * 8;
    const bool is_key = head == kSingleHeads;
    if (is_key ? work_.has_newest : head < kSingleHeads) {
      Elements low = {}, high = {};
      if (is_key || head < work_.heads) {
        const __nv_bfloat16* const from =
            is_key ? p_.k + work_.row * p_.k_stride + int64_t(work_.kv_head) * kHead
                   : p_.q + work_.row * p_.q_stride + int64_t(work_.head + head) * kHead;
        low = load_vector<__nv_bfloat16, 8>(from + at);
        high = load_vector<__nv_bfloat16, 8>(from + kHalf + at);
        const int64_t angle = int64_t(work_.position) * kHalf + at;
        const auto cos = load_vector<float, 8>(p_.cos + angle);
        const auto sin = load_vector<float, 8>(p_.sin + angle);
        rotate(low, high, cos.at, sin.at);
      }
      __nv_bfloat16* const to = is_key ? shared_.new_key : shared_.q[head];
      store_vector(to + at, low);
      store_vector(to + kHalf + at, high);
    } else if (work_.has_newest && warp_ == kSingleWarps - 1 && lane_ < kVectors) {
      const __nv_bfloat16* const v =
          p_.v + work_.row * p_.v_stride + int64_t(work_.kv_head) * kHead;
      store_vector(shared_.new_value + lane_ * 8, load_vector<__nv_bfloat16, 8>(v + lane_ * 8));
    }
  }

  /// Writes the new key and value to their page.
  __device__ void append(int page) const {
    if (warp_ != kSingleWarps - 1 || lane_ >= 2 * kVectors) return;
    const bool is_key = lane_ < kVectors;
    const int64_t slot = int64_t(page) * kSinglePage + work_.position % kSinglePage;
    const int at = lane_ % kVectors * 8;
    store_vector(
        (is_key ? p_.cached_keys : p_.cached_values) +
            (slot * p_.kv_heads + work_.kv_head) * kHead + at,
        load_vector<__nv_bfloat16, 8>((is_key ? shared_.new_key : shared_.new_value) + at));
  }

  __device__ void begin() {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        query_[i][half] = *reinterpret_cast<const uint32_t*>(
            &shared_.q[lane_ / 4][i * 16 + half * 8 + lane_ % 4 * 2]);
      }
#pragma unroll
      for (float& value : sum_[i]) value = 0;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) top_[c] = -INFINITY, total_[c] = 0;
  }

  __device__ void add_page(Stage& stage, int page) {
    const int key = page * kSinglePage + warp_ * kWarpKeys;  // the warp's first
    const int begin = work_.first - key, end = work_.position + 1 - key;
    if (begin >= kWarpKeys || end <= 0) return;
    if constexpr (kAppends) {
      if (end <= kWarpKeys) insert(stage, warp_ * kWarpKeys + end - 1);
    }
    if (begin <= 0 && end >= kWarpKeys) {
      add_keys<false>(stage, begin, end);
    } else {
      add_keys<true>(stage, begin, end);
    }
  }

  /// Replaces what the page had of the newest key and value before they were written.
  __device__ void insert(Stage& stage, int key) const {
    if (lane_ < 2 * kVectors) {
      const bool is_key = lane_ < kVectors;
      const int index = lane_ % kVectors;
      const __nv_bfloat16* const from = is_key ? shared_.new_key : shared_.new_value;
      std::byte* const to = page_vector(is_key ? stage.k : stage.v, key, index);
      store_vector(reinterpret_cast<__nv_bfloat16*>(to),
                   load_vector<__nv_bfloat16, 8>(from + index * 8));
    }
    __syncwarp();
  }

  /// Adds keys [begin, end) of the warp's 16. `kMasked`: others may have values that are no
  /// numbers.
  template <bool kMasked>
  __device__ void add_keys(Stage& stage, int begin, int end) {
    const int matrix = lane_ / 8, matrix_row = lane_ % 8;  // whose address this lane passes
    const int first = warp_ * kWarpKeys;
    float score[2][4] = {};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      uint32_t a[4];
      load_tile(a, page_vector(stage.k, first + matrix % 2 * 8 + matrix_row, i * 2 + matrix / 2));
      multiply_tile(score[i % 2], a, query_[i]);
    }
    float weight[4], top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = lane_ / 4 + e / 2 * 8;
      weight[e] = __fmul_rn(score[0][e] + score[1][e], p_.scale_log2);
      if (kMasked && (key < begin || key >= end)) weight[e] = -INFINITY;
      top[e % 2] = fmaxf(top[e % 2], weight[e]);
    }
    float keep[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      top[c] = fmaxf(top_[c], combine_rows(top[c], Larger{}));
      keep[c] = exp2_of(top_[c] - top[c]);
      top_[c] = top[c], total_[c] = __fmul_rn(total_[c], keep[c]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      weight[e] = exp2_of(weight[e] - top_[e % 2]);
      total_[e % 2] += weight[e];
    }
    const uint32_t weights[2] = {transposed(packed(weight[0], weight[1])),
                                 transposed(packed(weight[2], weight[3]))};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum_[i][e] *= keep[e % 2];
      uint32_t a[4];
      load_transposed_tile(
          a, page_vector(stage.v, first + matrix / 2 * 8 + matrix_row, i * 2 + matrix % 2));
      if constexpr (kMasked) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = half * 8 + lane_ % 4 * 2;
          const auto read = [&](int k) { return k >= begin && k < end; };
          const uint32_t mask = (read(key) ? 0xffffu : 0) | (read(key + 1) ? 0xffff0000u : 0);
          a[2 * half] &= mask, a[2 * half + 1] &= mask;
        }
      }
      multiply_tile(sum_[i], a, weights);
    }
  }

  /// Leaves the sums of the block in its memory.
  __device__ void add_warps() {
    auto& sums = shared_.sums;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float total = combine_rows(total_[c], Plus{});
      if (lane_ < 4) {
        shared_.scales_of_warps[warp_][lane_ * 2 + c] = make_float2(top_[c], total);
      }
    }
    wait_for_warps();  // all stages are used
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums.of_warps[warp_][lane_ % 4 * 2 + e % 2][i * 16 + e / 2 * 8 + lane_ / 4] = sum_[i][e];
      }
    }
    wait_for_warps();
    constexpr int kFours = kHead / 4;
    for (int i = thread_; i < work_.heads * kFours; i += 32 * kSingleWarps) {
      const int head = i / kFours, at = i % kFours * 4;
      float top = -INFINITY, total = 0;
      float4 sum = {};
#pragma unroll
      for (int w = 0; w < kSingleWarps; ++w) {
        top = fmaxf(top, shared_.scales_of_warps[w][head].x);
      }
#pragma unroll
      for (int w = 0; w < kSingleWarps; ++w) {
        const float2 scale = shared_.scales_of_warps[w][head];
        const float factor = factor_of(scale.x, top);
        const auto value = *reinterpret_cast<const float4*>(&sums.of_warps[w][head][at]);
        total = __fmaf_rn(factor, scale.y, total);
        add_scaled(sum, factor, value);
      }
      *reinterpret_cast<float4*>(&sums.of_block[head][at]) = sum;
      if (at == 0) shared_.scales[head] = make_float2(top, total);
    }
  }

  const FewParams& p_;
  Memory& shared_;
  const FewWork& work_;
  const int thread_, warp_, lane_;
  PipelineState<kStages> state_;
  uint32_t query_[kTiles][2];
  // Heads 2 (lane % 4) and the next; total_ has this lane's keys only.
  float top_[2], total_[2], sum_[kTiles][4];
};

/// Adds this block's share of the elements over the blocks of the cluster, and stores it.
template <class Memory, int kHead>
__device__ void add_blocks(const FewParams& p, Memory& shared, const FewWork& work) {
  const cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();
  constexpr int kFours = kHead / 4;
  const int fours = work.heads * kFours, end = fours * (work.rank + 1) / p.cluster;
  for (int i = fours * work.rank / p.cluster + int(threadIdx.x); i < end; i += kSingleThreads) {
    const int head = i / kFours, at = i % kFours * 4;
    constexpr int kAtOnce = 8;
    float top = -INFINITY, total = 0;
    float4 sum = {};
    for (int first = 0; first < p.cluster; first += kAtOnce) {
      float2 scales[kAtOnce];
      float4 values[kAtOnce];
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b) {
        if (first + b >= p.cluster) break;
        const Memory& other = *cluster.map_shared_rank(&shared, unsigned(first + b));
        scales[b] = other.scales[head];
        values[b] = *reinterpret_cast<const float4*>(&other.sums.of_block[head][at]);
      }
      float largest = top;
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b) {
        if (first + b >= p.cluster) break;
        largest = fmaxf(largest, scales[b].x);
      }
      const float keep = factor_of(top, largest);
      total = __fmul_rn(total, keep);
      sum.x = __fmul_rn(sum.x, keep), sum.y = __fmul_rn(sum.y, keep);
      sum.z = __fmul_rn(sum.z, keep), sum.w = __fmul_rn(sum.w, keep);
      top = largest;
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b) {
        if (first + b >= p.cluster) break;
        const float factor = factor_of(scales[b].x, top);
        total = __fmaf_rn(factor, scales[b].y, total);
        add_scaled(sum, factor, values[b]);
      }
    }
    const float inverse = 1 / total;
    *reinterpret_cast<uint2*>(p.out + work.row * p.out_stride + int64_t(work.head + head) * kHead +
                              at) = make_uint2(packed(sum.x * inverse, sum.y * inverse),
                                               packed(sum.z * inverse, sum.w * inverse));
  }
  cluster.sync();  // others may still read these sums
}

/// Heads of a row that is none.
template <int kHead>
__device__ void clear_heads(const FewParams& p, const FewWork& work) {
  if (work.rank > 0) return;
  auto* const out =
      reinterpret_cast<uint32_t*>(p.out + work.row * p.out_stride + int64_t(work.head) * kHead);
  for (int i = int(threadIdx.x); i < work.heads * kHead / 2; i += kSingleThreads) out[i] = 0;
}

constexpr int kFewBlocks = 2;  // of an SM

template <int kHead, int kStages, bool kAppends>
__global__ void __launch_bounds__(kSingleThreads, kFewBlocks)
    few_kernel(const __grid_constant__ FewParams p) {
  extern __shared__ std::byte memory[];
  using Memory = FewShared<kHead, kStages>;
  auto& shared = *reinterpret_cast<Memory*>(memory + (1024 - address_of(memory) % 1024) % 1024);
  let_next_start();
  FewWork work(p);
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&p.keys));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&p.values));
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(1), shared.empty[i].init(kSingleWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous();
  work.find_pages(p);
  if (work.sequence < 0) return clear_heads<kHead>(p, work);
  if (threadIdx.x < 32) {
    load_pages(p, shared, work);
  } else {
    FewMultiplier<kHead, kStages, kAppends>(p, shared, work).run();
  }
  __syncwarp();
  add_blocks<Memory, kHead>(p, shared, work);
}

template <int kHead>
constexpr int kFewStages = kHead == 64 ? 6 : 3;
template <int kHead>
constexpr int kFewBytes = int(sizeof(FewShared<kHead, kFewStages<kHead>>)) + 1024;

template <int kHead, bool kAppends>
auto prepare_few() {
  constexpr int kBytes = kFewBytes<kHead>;
  static_assert(kFewBlocks * (kBytes + 1024) <= 228 * 1024);
  const auto kernel = few_kernel<kHead, kFewStages<kHead>, kAppends>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "paged_attention");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
        "paged_attention");
  return kernel;
}

template <int kHead>
int count_resident(int cluster) {
  cudaLaunchAttribute size{};
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {unsigned(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(cluster);
  config.blockDim = kSingleThreads;
  config.dynamicSmemBytes = kFewBytes<kHead>;
  config.attrs = &size;
  config.numAttrs = 1;
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, prepare_few<kHead, true>(), &config),
        "paged_attention");
  return clusters;
}

template <int kHead, bool kAppends>
void launch_with_head(int rows, const FewParams& p, cudaStream_t stream) {
  const int clusters = rows * p.kv_heads * blocks_of_group(p.heads / p.kv_heads);
  launch_clusters_early("paged_attention", prepare_few<kHead, kAppends>(),
                        unsigned(clusters * p.cluster), unsigned(p.cluster), kSingleThreads,
                        size_t(kFewBytes<kHead>), stream, true, p);
}

}  // namespace

int resident_few_clusters(int head_dim, int cluster) {
  return head_dim == 64 ? count_resident<64>(cluster) : count_resident<128>(cluster);
}

void launch_few(int head_dim, bool appends, int rows, const FewParams& params,
                CUstream_st* stream) {
  if (head_dim == 64) {
    return appends ? launch_with_head<64, true>(rows, params, stream)
                   : launch_with_head<64, false>(rows, params, stream);
  }
  appends ? launch_with_head<128, true>(rows, params, stream)
          : launch_with_head<128, false>(rows, params, stream);
}

}  // namespace tandem::gpu::sm90
