// Forward pass of attention on Hopper's tensor cores. A block, one for each SM, takes 128 queries
// of a head after the other, 64 for each of two multiplying warpgroups, and visits the tiles of 128
// keys that they read, the last first, which another warp loads, also ahead of the queries that
// read them. Scores of a tile are multiplied while those of the tile before multiply the values.
#include <cuda_bf16.h>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include <algorithm>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/sm90/attention_kernels.h"
#include "kernels/cuda/sm90/key_tiles.cuh"

namespace tandem::gpu::sm90 {
namespace {

constexpr int kQueries = kForwardQueries;
constexpr int kStages = 2;

template <int kHead>
struct Shared {
  static constexpr int kBoxes = kHead / kBoxColumns;
  using Tile = std::byte[kBoxes][kGroups * kBoxBytes];
  alignas(1024) Tile q;
  alignas(1024) Tile k[kStages];
  alignas(1024) Tile v[kStages];
  FullBarrier q_full, k_full[kStages], v_full[kStages];
  EmptyBarrier q_empty, k_empty[kStages], v_empty[kStages];
  int ticket;  ///< of q; kNoTicket: there is no more
};
constexpr int kNoTicket = -1;

__host__ __device__ int tickets(const ForwardParams& p) {
  return (p.seq + kQueries - 1) / kQueries * p.sequences * p.heads;
}

/// Queries of a ticket, and the tiles of keys that they read. Those with the most keys come first.
struct Work {
  __device__ Work(const ForwardParams& p, int ticket)
      : tile((p.seq - 1) / kQueries - ticket / (p.sequences * p.heads)),
        sequence(ticket % (p.sequences * p.heads) / p.heads),
        head(ticket % p.heads),
        begin(first_key(p.mask, p.seq, sequence, tile * kQueries) / kKeyTile),
        end(tile + 1) {}
  int tile, sequence, head, begin, end;
};

/// The next ticket. Each block takes one that is too high, and the last to do so makes the counter
/// ready for the next launch.
__device__ int take_ticket(const ForwardParams& p) {
  const int ticket = atomicAdd(p.ticket, 1), count = tickets(p);
  if (ticket < count) return ticket;
  if (ticket == count + int(gridDim.x) - 1) *p.ticket = 0;
  return kNoTicket;
}

template <int kHead>
__device__ void load_all(const ForwardParams& p, Shared<kHead>& shared) {
  constexpr int kBoxes = Shared<kHead>::kBoxes;
  PipelineState<kStages> stage;
  PipelineState<1> queries;
  int ticket = take_ticket(p);
  while (ticket != kNoTicket) {
    const Work work(p, ticket);
    const int kv_column = work.head / (p.heads / p.kv_heads) * kHead;
    shared.q_empty.wait(queries.phase ^ 1);
    shared.ticket = ticket;
    shared.q_full.arrive_and_expect_tx(sizeof shared.q);
    load_boxes<kBoxes>(p.q, shared.q_full, shared.q, work.head * kHead, work.tile * kQueries,
                       work.sequence);
    queries.advance();
    ticket = take_ticket(p);
    for (int tile = work.end - 1; tile >= work.begin; --tile) {
      const int i = stage.index;
      shared.k_empty[i].wait(stage.phase ^ 1);
      shared.k_full[i].arrive_and_expect_tx(sizeof shared.k[i]);
      load_boxes<kBoxes>(p.k, shared.k_full[i], shared.k[i], kv_column, tile * kKeyTile,
                         work.sequence);
      shared.v_empty[i].wait(stage.phase ^ 1);
      shared.v_full[i].arrive_and_expect_tx(sizeof shared.v[i]);
      load_boxes<kBoxes>(p.v, shared.v_full[i], shared.v[i], kv_column, tile * kKeyTile,
                         work.sequence);
      stage.advance();
    }
  }
  shared.q_empty.wait(queries.phase ^ 1);
  shared.ticket = kNoTicket;
  shared.q_full.arrive();
}

/// Warpgroup of 64 queries. A thread has values of two of them, 8 apart.
template <int kHead>
class Multiplier : KeyTiles<kHead, kKeyTile, kStages, kQueries, Shared<kHead>> {
  using Tiles = KeyTiles<kHead, kKeyTile, kStages, kQueries, Shared<kHead>>;
  using Tiles::add_values, Tiles::end_values, Tiles::group_, Tiles::is_first_;
  using Tiles::issue_scores, Tiles::lane_, Tiles::scale, Tiles::shared_, Tiles::thread_;

 public:
  __device__ __forceinline__ Multiplier(const ForwardParams& p, Shared<kHead>& shared, int group)
      : Tiles(shared, group), p_(p) {}

  __device__ __forceinline__ void run() {
    while (true) {
      shared_.q_full.wait(queries_.phase);
      queries_.advance();
      const int ticket = shared_.ticket;
      if (ticket == kNoTicket) return;
      attend(Work(p_, ticket));
    }
  }

 private:
  __device__ __forceinline__ void begin(const Work& work) {
    query_ = work.tile * kQueries + group_ * kGroupRows + thread_ / 32 * 16 + lane_ / 4;
    const auto first_key_of = [&](int query) {
      return first_key(p_.mask, p_.seq, work.sequence, query);
    };
    from_[0] = first_key_of(query_), from_[1] = first_key_of(query_ + 8);
    last_from_ = first_key_of(min((work.tile + 1) * kQueries, p_.seq) - 1);
    is_first_ = true;
    for_each<2>([&](auto half) { largest_[half] = -INFINITY, total_[half] = 0; });
  }

  __device__ __forceinline__ void attend(const Work& work) {
    Sums<kHead> out;
    Sums<kKeyTile> scores;
    uint32_t weights[kKeyTile / 4];
    float factors[2];
    begin(work);
    issue_scores(scores);
    Tiles::template end_scores<0>(scores);
    find_weights(scores, work, work.end - 1, factors);
    round(scores, weights);
    for (int tile = work.end - 2; tile >= work.begin; --tile) {
      issue_scores(scores);
      add_values(out, weights);
      Tiles::template end_scores<1>(scores);
      find_weights(scores, work, tile, factors);
      end_values(out, weights);
      scale(out, factors[0], factors[1]);
      round(scores, weights);
    }
    if (lane_ == 0) shared_.q_empty.arrive();
    add_values(out, weights);
    end_values(out, weights);
    store(out, work);
  }

  /// Replaces a tile's scores by exp(score - largest), 0 for keys that a query does not read.
  /// `factors`: of the sums so far.
  __device__ __forceinline__ void find_weights(Sums<kKeyTile>& scores, const Work& work, int tile,
                                               float (&factors)[2]) {
    const int first = tile * kKeyTile;
    if (tile == work.tile || first < last_from_) {
      for_each<kKeyTile / 2>([&](auto i) {
        const int key = first + i / 4 * 8 + 2 * (lane_ % 4) + i % 2;
        constexpr int kRow = i / 2 % 2;
        const bool is_read = key <= query_ + 8 * kRow && key >= from_[kRow];
        scores[i] = is_read ? scores[i] : -INFINITY;
      });
    }
    float largest[2] = {largest_[0], largest_[1]};
    for_each<kKeyTile / 2>([&](auto i) {
      constexpr int kRow = i / 2 % 2;
      largest[kRow] = fmaxf(largest[kRow], scores[i]);
    });
    for_each<2>([&](auto half) {
      // Finite: every query reads its own key, which is in the first tile.
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
      factors[half] = exp2_of((largest_[half] - largest[half]) * p_.scale_log2);
      largest_[half] = largest[half];
      total_[half] *= factors[half];
      largest[half] *= p_.scale_log2;
    });
    for_each<kKeyTile / 2>([&](auto i) {
      constexpr int kRow = i / 2 % 2;
      scores[i] = exp2_of(scores[i] * p_.scale_log2 - largest[kRow]);
      total_[kRow] += scores[i];
    });
  }

  __device__ __forceinline__ void store(const Sums<kHead>& out, const Work& work) const {
    float inverse[2];
    for_each<2>([&](auto half) {
      float total = total_[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      inverse[half] = 1 / total;
      const int query = query_ + 8 * half;
      if (lane_ % 4 == 0 && query < p_.seq) {
        p_.log_sums[(int64_t(work.sequence) * p_.heads + work.head) * p_.seq + query] =
            largest_[half] * p_.scale + logf(total);
      }
    });
    __nv_bfloat16* const to = p_.out + (int64_t(work.sequence) * p_.seq + query_) * p_.stride +
                              work.head * kHead + 2 * (lane_ % 4);
    for_each<kHead / 4>([&](auto i) {
      constexpr int kRow = i % 2;
      if (query_ + 8 * kRow >= p_.seq) return;
      *reinterpret_cast<uint32_t*>(to + 8 * kRow * p_.stride + i / 2 * 8) =
          Pair::pack(out[2 * i] * inverse[kRow], out[2 * i + 1] * inverse[kRow]);
    });
  }

  const ForwardParams& p_;
  PipelineState<1> queries_;
  // Values of a ticket:
  int query_, from_[2];          // the first one, and the first keys of both
  int last_from_;                // first key of the last query
  float largest_[2], total_[2];  // the latter of this thread
};

template <int kHead>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ std::byte memory[];
  auto& shared =
      *reinterpret_cast<Shared<kHead>*>(memory + (1024 - address_of(memory) % 1024) % 1024);
  if (threadIdx.x == 0) {
    shared.q_full.init(1), shared.q_empty.init(kGroups * 4);
    for (int i = 0; i < kStages; ++i) {
      shared.k_full[i].init(1), shared.v_full[i].init(1);
      shared.k_empty[i].init(kGroups), shared.v_empty[i].init(kGroups);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<kLoadingRegisters>();
    if (warp == 0 && cute::elect_one_sync()) load_all<kHead>(p, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kMultiplyingRegisters>();
    Multiplier<kHead>(p, shared, warp / 4 - 1).run();
  }
}

template <int kHead>
void launch_with(const ForwardParams& p, cudaStream_t stream) {
  constexpr int kBytes = int(sizeof(Shared<kHead>)) + 1024;
  static_assert(kBytes <= 227 * 1024);
  check(cudaFuncSetAttribute(forward_kernel<kHead>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kBytes),
        "attention");
  const int blocks = std::min(tickets(p), p.sms);
  forward_kernel<kHead><<<blocks, kThreads, size_t(kBytes), stream>>>(p);
  check_launch("attention");
}

}  // namespace

void launch_forward(int head_dim, const ForwardParams& params, CUstream_st* stream) {
  if (head_dim == 64) return launch_with<64>(params, stream);
  launch_with<128>(params, stream);
}

}  // namespace tandem::gpu::sm90
