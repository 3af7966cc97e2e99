// Backward pass of attention on Hopper's tensor cores, with equal bits in every run. A block owns
// 128 keys and visits the tiles of 64 queries that read them, the last first: two warpgroups
// multiply, each for 64 of the keys, while one warp loads and two others, by turns, add the block's
// share of the queries' gradients to memory. Shares of a tile are added in the order of their keys,
// for which blocks wait for each other; blocks begin in that order, so the one waited for always
// runs.
//
//   weights = exp(k q^T - log sums),   dv += weights dout
//   dscores = weights (v dout^T - deltas),   dk += dscores q,   dq += dscores^T k
#include <cuda_bf16.h>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/sm90/attention.cuh"
#include "kernels/cuda/sm90/attention_kernels.h"

namespace tandem::gpu::sm90 {
namespace {

constexpr int kStages = 2;
constexpr int kAllMultiplying = 128 * kGroups;
constexpr int kShareWarps = 2;  // warps that add, by turns

struct Rows {
  float log_sums[kQueryTile];
  int first_keys[kQueryTile];
};

template <int kHead>
struct Shared {
  static constexpr int kBoxes = kHead / kBoxColumns;
  alignas(1024) std::byte k[kBoxes][kGroups * kBoxBytes];
  alignas(1024) std::byte v[kBoxes][kGroups * kBoxBytes];
  alignas(1024) std::byte q[kStages][kBoxes][kBoxBytes];
  alignas(1024) std::byte dout[kStages][kBoxes][kBoxBytes];
  alignas(1024) std::byte dscores[2][kGroups][kBoxBytes];  // [key, query]
  alignas(128) float dq[kGroups][kQueryTile * kHead / kGroups];
  alignas(128) Rows rows[kStages];
  alignas(128) float deltas[kStages][kQueryTile];
  FullBarrier kv_full, q_full[kStages], dout_full[kStages];
  EmptyBarrier q_empty[kStages], dout_empty[kStages], dq_full[kShareWarps], dq_empty;
  int ticket;
};

/// Keys of a block, and the tiles of queries that read them, of all query heads of a key head.
struct Work {
  __device__ Work(const BackwardParams& p, int ticket)
      : tile(ticket / (p.sequences * p.kv_heads)),
        sequence(ticket % (p.sequences * p.kv_heads) / p.kv_heads),
        kv_head(ticket % p.kv_heads),
        begin(tile * (kKeyTile / kQueryTile)),
        end(p.ends[sequence * p.key_tiles + tile]),
        heads(p.heads / p.kv_heads) {}
  int tile, sequence, kv_head, begin, end, heads;
  /// Calls body(head, query tile), the last tile first. A tile's heads follow each other: blocks
  /// that began together then come to a tile together, however many of a head's tiles read their
  /// keys, and need not wait long for each other.
  template <class Body>
  __device__ __forceinline__ void for_each_step(const Body& body) const {
    for (int queries = end - 1; queries >= begin; --queries) {
      for (int head = kv_head * heads; head < (kv_head + 1) * heads; ++head) body(head, queries);
    }
  }
};

/// Index of a tile's first query in the log sums and deltas.
__device__ int64_t row_of(const BackwardParams& p, const Work& work, int head, int queries) {
  return (int64_t(work.sequence) * p.heads + head) * p.query_tiles * kQueryTile +
         queries * kQueryTile;
}

// ---- Loading thread -----------------------------------------------------------------------------

__device__ void load_row(const void* from, FullBarrier& full, void* to) {
  cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&full), to,
                                 kQueryTile * int(sizeof(float)));
}

template <int kHead>
__device__ void load_all(const BackwardParams& p, const Work& work, Shared<kHead>& shared) {
  constexpr int kBoxes = Shared<kHead>::kBoxes;
  constexpr uint32_t kTileBytes = kBoxes * kBoxBytes, kRow = kQueryTile * sizeof(float);
  shared.kv_full.arrive_and_expect_tx(2 * kGroups * kTileBytes);
  load_boxes<kBoxes>(p.k, shared.kv_full, shared.k, work.kv_head * kHead, work.tile * kKeyTile,
                     work.sequence);
  load_boxes<kBoxes>(p.v, shared.kv_full, shared.v, work.kv_head * kHead, work.tile * kKeyTile,
                     work.sequence);
  PipelineState<kStages> stage;
  const auto load_queries = [&](int head, int queries) {
    FullBarrier& full = shared.q_full[stage.index];
    shared.q_empty[stage.index].wait(stage.phase ^ 1);
    full.arrive_and_expect_tx(kTileBytes + 2 * kRow);
    load_boxes<kBoxes>(p.q, full, shared.q[stage.index], head * kHead, queries * kQueryTile,
                       work.sequence);
    load_row(p.log_sums + row_of(p, work, head, queries), full, shared.rows[stage.index].log_sums);
    load_row(p.first_keys + (int64_t(work.sequence) * p.query_tiles + queries) * kQueryTile, full,
             shared.rows[stage.index].first_keys);
  };
  work.for_each_step([&](int head, int queries) {
    load_queries(head, queries);
    FullBarrier& full = shared.dout_full[stage.index];
    shared.dout_empty[stage.index].wait(stage.phase ^ 1);
    full.arrive_and_expect_tx(kTileBytes + kRow);
    load_boxes<kBoxes>(p.dout, full, shared.dout[stage.index], head * kHead, queries * kQueryTile,
                       work.sequence);
    load_row(p.deltas + row_of(p, work, head, queries), full, shared.deltas[stage.index]);
    stage.advance();
  });
  // Scores of the next step are computed in every step; here of the first one, for nothing.
  load_queries(work.kv_head * work.heads, work.end - 1);
}

// ---- Threads that add gradients of queries ------------------------------------------------------

__device__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ void add_release(int* to) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(to) : "memory");
}
__device__ void fence_memory_proxies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ void reduce_bulk(const void* from, void* to, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(address_of(from)), "r"(bytes)
      : "memory");
}

/// Waits until the shares of `count` blocks are in memory. Traps after some 10 s of the clock: no
/// block waits as long for one that runs, so this is a defect, which must not hang the device.
__device__ void await_shares(const int* added, int count) {
  const long long begin = clock64();
  while (load_acquire(added) != count) {
    if (clock64() - begin > 20'000'000'000) __trap();
  }
}

/// Adds the shares of every step whose turn is `turn`. A step's predecessor in the order of keys is
/// waited for before its share exists, and what follows the reading of a share goes on beside the
/// next step of the other thread.
template <int kHead>
__device__ void add_all(const BackwardParams& p, const Work& work, Shared<kHead>& shared,
                        int turn) {
  uint32_t phase = 0;
  int step = 0;
  work.for_each_step([&](int head, int queries) {
    if (step++ % kShareWarps != turn) return;
    const int64_t tile = (int64_t(work.sequence) * p.heads + head) * p.query_tiles + queries;
    const int first =
        p.first_keys[(int64_t(work.sequence) * p.query_tiles + queries) * kQueryTile] / kKeyTile;
    await_shares(p.added + tile, work.tile - first);
    shared.dq_full[turn].wait(phase);
    fence_memory_proxies();
    float* const to = p.dq + tile * (kQueryTile * kHead);
    if (work.tile == first) {
      cute::SM90_BULK_COPY_S2G::copy(shared.dq, to, int(sizeof shared.dq));
    } else {
      reduce_bulk(shared.dq, to, int(sizeof shared.dq));
    }
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();  // the buffer has been read
    shared.dq_empty.arrive();
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // the sums are in memory
    fence_memory_proxies();
    add_release(p.added + tile);
    phase ^= 1;
  });
}

// ---- Multiplying warpgroups ---------------------------------------------------------------------

template <int kHead>
class Multiplier {
  static constexpr int kHalf = kHead / kGroups;
  static constexpr int kKeysBox = kGroups * kBoxBytes;  // bytes of a box of k and v
  static constexpr uint64_t kSlice = k_stride(true);    // 16 rows of an operand read as stored

 public:
  __device__ Multiplier(const BackwardParams& p, const Work& work, Shared<kHead>& shared, int group)
      : p_(p),
        work_(work),
        shared_(shared),
        group_(group),
        thread_(int(threadIdx.x) % 128),
        warp_(thread_ / 32),
        lane_(thread_ % 32) {}

  __device__ __forceinline__ void run() {
    Sums<kHead> dk, dv;
    shared_.kv_full.wait(0);
    Sums<kQueryTile> scores;
    issue_scores(scores);
    cute::warpgroup_wait<0>();
    fence(scores);
    work_.for_each_step([&](int, int queries) { run_step(scores, dk, dv, queries); });
    rotate_back(dk);
    store(dk, p_.scale, p_.dk);
    store(dv, 1, p_.dv);
  }

 private:
  __device__ uint32_t address(const std::byte* operand) const { return address_of(operand); }

  /// Issues scores = k q^T of the stage that is loaded next.
  __device__ __forceinline__ void issue_scores(Sums<kQueryTile>& scores) {
    shared_.q_full[next_.index].wait(next_.phase);
    fence(scores);
    cute::warpgroup_arrive();
    multiply_heads<kHead, kQueryTile>(scores, address(shared_.k[0]) + group_ * kBoxBytes, kKeysBox,
                                      address(shared_.q[next_.index][0]), kBoxBytes);
    cute::warpgroup_commit_batch();
    next_.advance();
  }

  /// A tile's queries of a head, whose `scores` are there; leaves those of the next step.
  __device__ __forceinline__ void run_step(Sums<kQueryTile>& scores, Sums<kHead>& dk,
                                           Sums<kHead>& dv, int queries) {
    const int stage = stage_.index;
    Sums<kQueryTile> dscores;
    shared_.dout_full[stage].wait(stage_.phase);
    fence(dscores);
    cute::warpgroup_arrive();
    multiply_heads<kHead, kQueryTile>(dscores, address(shared_.v[0]) + group_ * kBoxBytes, kKeysBox,
                                      address(shared_.dout[stage][0]), kBoxBytes);
    cute::warpgroup_commit_batch();

    find_weights(scores, queries, shared_.rows[stage]);
    uint32_t weights[kQueryTile / 4];
    round(scores, weights);
    add_rows(dv, weights, shared_.dout[stage][0]);
    // Both: with `weights` and `rounded` in use the compiler lacks registers, and serializes.
    cute::warpgroup_wait<0>();
    fence(weights);
    fence(dscores);
    fence(dv);
    find_dscores(scores, dscores, shared_.deltas[stage]);
    uint32_t rounded[kQueryTile / 4];
    round(dscores, rounded);
    write_box(rounded, shared_.dscores[parity_][group_]);
    cute::tma_store_fence();
    cutlass::arch::NamedBarrier::sync(kAllMultiplying, 1);
    if (thread_ == 0) shared_.dout_empty[stage].arrive();

    Sums<kHalf> dq;
    issue_queries(dq);
    add_rows(dk, rounded, shared_.q[stage][0]);
    is_first_ = false;
    cute::warpgroup_wait<1>();
    fence(dq);
    hand_over(dq);
    issue_scores(scores);
    cute::warpgroup_wait<0>();
    fence(dk);
    fence(rounded);
    fence(scores);
    if (thread_ == 0) shared_.q_empty[stage].arrive();
    stage_.advance();
    parity_ ^= 1;
  }

  /// Softmax from the log sums, 0 for keys that a query does not read.
  __device__ __forceinline__ void find_weights(Sums<kQueryTile>& scores, int queries,
                                               const Rows& rows) const {
    for_each<kQueryTile / 2>(
        [&](auto i) { scores[i] = exp2_of(scores[i] * p_.scale_log2 - rows.log_sums[column(i)]); });
    const int first = work_.tile * kKeyTile, query = queries * kQueryTile;
    if (first + kKeyTile - 1 <= query && rows.first_keys[kQueryTile - 1] <= first) return;
    for_each<kQueryTile / 2>([&](auto i) {
      const int key = first + key_row(i / 2 % 2);
      const bool is_read = key <= query + column(i) && key >= rows.first_keys[column(i)];
      scores[i] = is_read ? scores[i] : 0;
    });
  }
  /// Column of an accumulator.
  __device__ __forceinline__ int column(int i) const { return i / 4 * 8 + 2 * (lane_ % 4) + i % 2; }
  /// Row of this thread's accumulators among the block's keys.
  __device__ int key_row(int half) const {
    return group_ * kGroupRows + 16 * warp_ + lane_ / 4 + 8 * half;
  }

  __device__ __forceinline__ void find_dscores(const Sums<kQueryTile>& weights,
                                               Sums<kQueryTile>& dscores,
                                               const float* deltas) const {
    for_each<kQueryTile / 2>(
        [&](auto i) { dscores[i] = weights[i] * (dscores[i] - deltas[column(i)]); });
  }

  __device__ __forceinline__ void write_box(const uint32_t (&rounded)[kQueryTile / 4],
                                            std::byte* box) const {
#pragma unroll
    for (int i = 0; i < kQueryTile / 16; ++i) {
      fused::store_16(rounded + 4 * i, fused::lane_address(address_of(box), warp_, lane_, i));
    }
  }

  /// Issues sums += factors[keys, queries] rows[queries, kHead], or = in the first step.
  __device__ __forceinline__ void add_rows(Sums<kHead>& sums, uint32_t (&factors)[kQueryTile / 4],
                                           const std::byte* rows) {
    using Instruction = typename Product<kHead, kRowsOfK, kColumnsOfK>::Registers;
    const uint64_t from = operand_descriptor<true>(address(rows));
    fence(sums);
    fence(factors);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kQueryTile / 16; ++k) {
      multiply<Instruction>(sums, factors + 4 * k, from + k * kSlice, is_first_ && k == 0,
                            std::make_index_sequence<kHead / 2>{});
    }
    cute::warpgroup_commit_batch();
  }
  /// Issues dq = dscores^T k, this group's half of the columns.
  __device__ __forceinline__ void issue_queries(Sums<kHalf>& dq) {
    using Instruction = typename Product<kHalf, kColumnsOfK, kColumnsOfK>::Shared;
    constexpr int kHalfBytes = kHalf * 2;
    const int column = group_ * kHalfBytes;
    const uint64_t dscores = operand_descriptor<true>(address(shared_.dscores[parity_][0])),
                   k = operand_descriptor<true>(address(shared_.k[column / kRowBytes]) +
                                                column % kRowBytes);
    fence(dq);
    cute::warpgroup_arrive();
#pragma unroll
    for (int slice = 0; slice < kKeyTile / 16; ++slice) {
      multiply<Instruction>(dq, dscores + slice * kSlice, k + slice * kSlice, slice == 0,
                            std::make_index_sequence<kHalf / 2>{});
    }
    cute::warpgroup_commit_batch();
  }
  /// Hands this block's share of dq to the thread whose turn it is.
  __device__ __forceinline__ void hand_over(const Sums<kHalf>& dq) {
    shared_.dq_empty.wait(dq_phase_ ^ 1);
    for_each<kHalf / 8>([&](auto i) {
      reinterpret_cast<float4*>(shared_.dq[group_])[i * 128 + thread_] = {
          dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
    });
    cute::tma_store_fence();
    static_assert(kShareWarps == 2, "whose turn it is is the phase");
    shared_.dq_full[dq_phase_].arrive();
    dq_phase_ ^= 1;
  }

  /// Takes the gradient of the rotated keys to that of the keys.
  __device__ __forceinline__ void rotate_back(Sums<kHead>& sums) const {
    const int row = work_.tile * kKeyTile + key_row(0);
    for_each<kHead / 16 * 2>([&](auto i) {
      constexpr int kRow = i % 2, kLow = 2 * i, kHigh = kLow + kHead / 4;
      const BackRotation rotation(p_.angles, min(row + 8 * kRow, p_.seq - 1),
                                  i / 2 * 8 + 2 * (lane_ % 4));
      rotation.apply(&sums[kLow], &sums[kHigh]);
    });
  }
  __device__ __forceinline__ void store(const Sums<kHead>& sums, float scale,
                                        __nv_bfloat16* to) const {
    const int row = work_.tile * kKeyTile + key_row(0);
    to += (int64_t(work_.sequence) * p_.seq + row) * p_.stride + work_.kv_head * kHead +
          2 * (lane_ % 4);
    for_each<kHead / 4>([&](auto i) {
      constexpr int kRow = i % 2;
      if (row + 8 * kRow >= p_.seq) return;
      *reinterpret_cast<uint32_t*>(to + 8 * kRow * p_.stride + i / 2 * 8) =
          Pair::pack(sums[2 * i] * scale, sums[2 * i + 1] * scale);
    });
  }

  const BackwardParams& p_;
  const Work& work_;
  Shared<kHead>& shared_;
  const int group_, thread_, warp_, lane_;
  PipelineState<kStages> stage_, next_;
  int parity_ = 0;
  bool is_first_ = true;  // step: dk and dv have no values
  uint32_t dq_phase_ = 0;
};

template <int kHead>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ std::byte memory[];
  auto& shared =
      *reinterpret_cast<Shared<kHead>*>(memory + (1024 - address_of(memory) % 1024) % 1024);
  if (threadIdx.x == 0) {
    shared.ticket = atomicAdd(p.ticket, 1);
    shared.kv_full.init(1);
    for (int i = 0; i < kStages; ++i) {
      shared.q_full[i].init(1), shared.dout_full[i].init(1);
      shared.q_empty[i].init(kGroups), shared.dout_empty[i].init(kGroups);
    }
    for (int turn = 0; turn < kShareWarps; ++turn) shared.dq_full[turn].init(kAllMultiplying);
    shared.dq_empty.init(1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  const Work work(p, shared.ticket);
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<kLoadingRegisters>();
    if (warp == 0 && cute::elect_one_sync()) load_all<kHead>(p, work, shared);
    if (warp >= 1 && warp <= kShareWarps && cute::elect_one_sync()) {
      add_all<kHead>(p, work, shared, warp - 1);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kMultiplyingRegisters>();
    Multiplier<kHead>(p, work, shared, warp / 4 - 1).run();
  }
}

template <int kHead>
void launch_with(const BackwardParams& p, const Mask& mask, const BackwardRows& rows,
                 cudaStream_t stream) {
  constexpr int kBytes = int(sizeof(Shared<kHead>)) + 1024;
  static_assert(kBytes <= 227 * 1024);
  check(cudaFuncSetAttribute(backward_kernel<kHead>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kBytes),
        "attention_backward");
  prepare_backward(kHead, p, mask, rows, stream);
  backward_kernel<kHead>
      <<<p.sequences * p.kv_heads * p.key_tiles, kThreads, size_t(kBytes), stream>>>(p);
  check_launch("attention_backward");
  round_gradient(kHead, p, rows.dq, stream);
}

}  // namespace

void launch_backward(int head_dim, const BackwardParams& params, const Mask& mask,
                     const BackwardRows& rows, CUstream_st* stream) {
  if (head_dim == 64) return launch_with<64>(params, mask, rows, stream);
  launch_with<128>(params, mask, rows, stream);
}

}  // namespace tandem::gpu::sm90
