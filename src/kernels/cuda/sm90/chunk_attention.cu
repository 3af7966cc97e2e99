// Attention of chunks of prompts over pages on Hopper's tensor cores. A block, one for each SM,
// takes one tile of queries after the other, 64 pairs of a token and a head for each of two
// multiplying warpgroups, and visits the tiles of keys that they read, the last first, which
// another warp loads, also ahead of the queries that read them. Scores of a tile are multiplied
// while those of the tile before multiply the values.
//
// A tile of keys is two pages from an even page of the sequence on. A row's sums are in the order
// of these tiles; tiles that it does not read change nothing. So its bits depend neither on its
// chunk nor on its place in it.
#include <cuda_bf16.h>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include <algorithm>

#include "core/cuda/check.h"
#include "core/cuda/early_start.cuh"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/sm90/chunk_order.cuh"
#include "kernels/cuda/sm90/key_tiles.cuh"

namespace tandem::gpu::sm90 {
namespace {

constexpr int kStages = 3;
constexpr int kPages = 2;  // of a tile of keys
constexpr int kKeys = kPages * kChunkPage;
// The loading warp finds the order of tiles too, which kLoadingRegisters are too few for.
constexpr int kLoaderRegisters = 40, kMultiplierRegisters = 232;

template <int kHead>
struct Shared {
  static constexpr int kBoxes = kHead / kBoxColumns;
  using Queries = std::byte[kBoxes][kChunkTile * kRowBytes];
  using Keys = std::byte[kBoxes][kKeys * kRowBytes];
  alignas(1024) Queries q;
  alignas(1024) Keys k[kStages];
  alignas(1024) Keys v[kStages];
  FullBarrier q_full, k_full[kStages], v_full[kStages];
  EmptyBarrier q_empty, k_empty[kStages], v_empty[kStages];
  Work work;  // of q
  PlacedChunk chunks[kMaxChunks];
};

/// The loading warp. A lane loads a box of a page of each tile of keys.
template <int kHead>
class Loader {
  using Memory = Shared<kHead>;
  static constexpr int kBoxes = Memory::kBoxes;

 public:
  __device__ Loader(const ChunkParams& p, Memory& shared)
      : p_(p),
        shared_(shared),
        lane_(int(threadIdx.x) % 32),
        page_(lane_ / kBoxes),
        box_(lane_ % kBoxes),
        order_(p, shared.chunks) {}

  __device__ void run() {
    const int count = order_.num_tickets();
    int taken = take_ticket();
    while (true) {
      const int ticket = __shfl_sync(~0u, taken, 0);
      if (ticket >= count) {
        // The last block to see this makes the counter ready for the next launch.
        if (lane_ == 0 && ticket == count + int(gridDim.x) - 1) *p_.ticket = 0;
        break;
      }
      const Work work = order_.find(ticket);
      load_queries(work);
      taken = take_ticket();
      load_keys(work);
    }
    load_queries({});
  }

 private:
  __device__ int take_ticket() const { return lane_ == 0 ? atomicAdd(p_.ticket, 1) : 0; }

  __device__ void load_queries(const Work& work) {
    shared_.q_empty.wait(queries_.phase ^ 1);
    if (lane_ == 0) {
      shared_.work = work;
      FullBarrier& full = shared_.q_full;
      if (work.tokens == 0) {
        full.arrive();
      } else {
        const int rows = kChunkTile / p_.heads_of_tile * p_.heads_of_tile;
        full.arrive_and_expect_tx(kBoxes * rows * kRowBytes);
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          load(p_.q, full, shared_.q[box], box * kBoxColumns, work.head, work.row);
        }
      }
    }
    __syncwarp();
    queries_.advance();
  }

  __device__ void load_keys(const Work& work) {
    const int32_t* const line = p_.pages + work.sequence * p_.pages_of_line;
    const int first = first_key(p_, work.position) / kChunkPage,
              last = (work.position + work.tokens - 1) / kChunkPage;
    // Others are not read: the list may lack them. Elements of page num_pages are loaded as zeros.
    const auto page_of = [&](int tile) {
      const int page = tile * kPages + page_;
      return page_ < kPages && page >= first && page <= last ? line[page] : p_.num_pages;
    };
    const int column = work.head / (p_.heads / p_.kv_heads) * kHead + box_ * kBoxColumns;
    int page = page_of(work.end - 1);
    for (int tile = work.end - 1; tile >= work.begin; --tile) {
      const int i = stage_.index;
      const int next = tile > work.begin ? page_of(tile - 1) : 0;
      load_tile(p_.keys, shared_.k_empty[i], shared_.k_full[i], shared_.k[i], column, page);
      load_tile(p_.values, shared_.v_empty[i], shared_.v_full[i], shared_.v[i], column, page);
      stage_.advance();
      page = next;
    }
  }
  __device__ void load_tile(const CUtensorMap& map, EmptyBarrier& empty, FullBarrier& full,
                            typename Memory::Keys& to, int column, int page) {
    empty.wait(stage_.phase ^ 1);
    if (lane_ == 0) full.arrive_and_expect_tx(sizeof to);
    __syncwarp();
    if (page_ < kPages) load(map, full, to[box_] + page_ * kChunkPage * kRowBytes, column, 0, page);
  }
  __device__ static void load(const CUtensorMap& map, FullBarrier& full, void* to, int x, int y,
                              int z) {
    cute::SM90_TMA_LOAD_3D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                                 uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL), to, x, y, z);
  }

  const ChunkParams& p_;
  Memory& shared_;
  const int lane_, page_, box_;
  Order<kKeys> order_;
  PipelineState<kStages> stage_;
  PipelineState<1> queries_;
};

/// Barriers of warpgroups; 0 is the block's.
constexpr int kTurn = 1, kGroupBarrier = kTurn + kGroups;

/// Warpgroup of 64 pairs of a token and a head. A thread has values of two of them, 8 apart.
template <int kHead>
class Multiplier : KeyTiles<kHead, kKeys, kStages, kChunkTile, Shared<kHead>> {
  using Tiles = KeyTiles<kHead, kKeys, kStages, kChunkTile, Shared<kHead>>;
  using Tiles::add_values, Tiles::end_values, Tiles::group_, Tiles::is_first_, Tiles::kKeyBox;
  using Tiles::issue_scores, Tiles::lane_, Tiles::scale, Tiles::shared_, Tiles::thread_;
  using Tiles::values_;

 public:
  __device__ __forceinline__ Multiplier(const ChunkParams& p, Shared<kHead>& shared, int group)
      : Tiles(shared, group), p_(p) {}

  __device__ __forceinline__ void run() {
    if (group_ == 0) give_turn();  // to the other, which is ahead from then on
    while (true) {
      shared_.q_full.wait(queries_.phase);
      const Work work = shared_.work;
      if (work.tokens == 0) break;
      attend(work);
      queries_.advance();
    }
    if (group_ == 1) take_turn();
  }

 private:
  __device__ __forceinline__ void begin(const Work& work) {
    const int first = group_ * kGroupRows, row = first + thread_ / 32 * 16 + lane_ / 4;
    for_each<2>([&](auto half) {
      const int token = (row + 8 * half) / p_.heads_of_tile;
      last_[half] = work.position + token;
      from_[half] = first_key(p_, last_[half]);
      largest_[half] = -INFINITY, total_[half] = 0;
    });
    first_last_ = work.position + first / p_.heads_of_tile;
    last_from_ = first_key(p_, work.position + work.tokens - 1);
    is_first_ = true;
  }

  __device__ __forceinline__ void attend(const Work& work) {
    Sums<kHead> out;
    Sums<kKeys> scores;
    uint32_t weights[kKeys / 4];
    float factors[2];
    begin(work);
    issue_scores(scores);
    Tiles::template end_scores<0>(scores);
    find_weights(scores, work.end - 1, factors);
    round(scores, weights);
    clear_unwritten(work.end_key - (work.end - 1) * kKeys);
    for (int tile = work.end - 2; tile >= work.begin; --tile) {
      take_turn();
      issue_scores(scores);
      add_values(out, weights);
      give_turn();
      Tiles::template end_scores<1>(scores);
      find_weights(scores, tile, factors);
      end_values(out, weights);
      scale(out, factors[0], factors[1]);
      round(scores, weights);
    }
    if (lane_ == 0) shared_.q_empty.arrive();
    add_values(out, weights);
    end_values(out, weights);
    store(out, work);
  }

  /// Lets warpgroups multiply by turns, so that one finds its weights while the other multiplies.
  __device__ __forceinline__ void take_turn() const {
    asm volatile("bar.sync %0, %1;" ::"r"(kTurn + group_), "n"(128 * kGroups) : "memory");
  }
  __device__ __forceinline__ void give_turn() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(kTurn + 1 - group_), "n"(128 * kGroups) : "memory");
  }

  /// Clears the values of the first tile from row `end` on, which nothing may have been written to:
  /// their weights are 0, and what is there may be no number. Each group clears them for itself.
  __device__ __forceinline__ void clear_unwritten(int end) {
    if (end >= kKeys) return;
    shared_.v_full[values_.index].wait(values_.phase);
#pragma unroll
    for (int box = 0; box < Shared<kHead>::kBoxes; ++box) {
      auto* const rows = reinterpret_cast<uint4*>(shared_.v[values_.index][box]);
      for (int i = end * (kRowBytes / 16) + thread_; i < kKeyBox / 16; i += 128) rows[i] = {};
    }
    cutlass::arch::fence_view_async_shared();
    asm volatile("bar.sync %0, 128;" ::"r"(kGroupBarrier + group_) : "memory");
  }
  /// Replaces a tile's scores by exp(score - largest), 0 for keys that a query does not read.
  /// `factors`: of the sums so far.
  __device__ __forceinline__ void find_weights(Sums<kKeys>& scores, int tile, float (&factors)[2]) {
    const int first = tile * kKeys;
    if (first + kKeys - 1 > first_last_ || first < last_from_) {
      for_each<kKeys / 2>([&](auto i) {
        const int key = first + i / 4 * 8 + 2 * (lane_ % 4) + i % 2;
        constexpr int kRow = i / 2 % 2;
        scores[i] = key <= last_[kRow] && key >= from_[kRow] ? scores[i] : -INFINITY;
      });
    }
    float largest[2] = {largest_[0], largest_[1]};
    for_each<kKeys / 2>([&](auto i) {
      constexpr int kRow = i / 2 % 2;
      largest[kRow] = fmaxf(largest[kRow], scores[i]);
    });
    for_each<2>([&](auto half) {
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
      const float before = largest_[half];
      largest_[half] = largest[half];
      if (largest[half] == -INFINITY) largest[half] = 0;  // the query has read no key yet
      factors[half] = exp2_of((before - largest[half]) * p_.scale_log2);
      total_[half] *= factors[half];
      largest[half] *= p_.scale_log2;
    });
    for_each<kKeys / 2>([&](auto i) {
      constexpr int kRow = i / 2 % 2;
      scores[i] = exp2_of(scores[i] * p_.scale_log2 - largest[kRow]);
      total_[kRow] += scores[i];
    });
  }

  __device__ __forceinline__ void store(const Sums<kHead>& out, const Work& work) const {
    const int row = group_ * kGroupRows + thread_ / 32 * 16 + lane_ / 4;
    for_each<2>([&](auto half) {
      float total = total_[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const float inverse = 1 / total;
      const int pair = row + 8 * half, token = pair / p_.heads_of_tile,
                head = work.head + pair % p_.heads_of_tile;
      __nv_bfloat16* const to = p_.out + int64_t(work.row + token) * p_.stride + head * kHead;
      for_each<kHead / 32>([&](auto block) {  // of 32 columns, four vectors
        uint32_t words[4];
        for_each<4>([&](auto i) {
          constexpr int kAt = 16 * block + 4 * i + 2 * half;
          // + 0: the same sign of a zero, whichever tiles were added to it
          words[i] = Pair::pack(out[kAt] * inverse + 0.f, out[kAt + 1] * inverse + 0.f);
        });
        transpose(words, lane_);
        if (token >= work.tokens) return;
        *reinterpret_cast<uint4*>(to + (4 * block + lane_ % 4) * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
      });
    });
  }

  const ChunkParams& p_;
  PipelineState<1> queries_;
  // Values of a ticket:
  int last_[2], from_[2];        // last and first keys of both
  int first_last_, last_from_;   // the first last key of the warpgroup, the last first key of all
  float largest_[2], total_[2];  // the latter of this thread
};

template <int kHead>
__global__ void __launch_bounds__(kThreads, 1) chunk_kernel(const __grid_constant__ ChunkParams p) {
  extern __shared__ std::byte memory[];
  auto& shared =
      *reinterpret_cast<Shared<kHead>*>(memory + (1024 - address_of(memory) % 1024) % 1024);
  let_next_start();
  if (threadIdx.x == 0) {
    shared.q_full.init(1), shared.q_empty.init(kGroups * 4);
    for (int i = 0; i < kStages; ++i) {
      shared.k_full[i].init(1), shared.v_full[i].init(1);
      shared.k_empty[i].init(kGroups), shared.v_empty[i].init(kGroups);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous();
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<kLoaderRegisters>();
    if (warp == 0) Loader<kHead>(p, shared).run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<kMultiplierRegisters>();
    Multiplier<kHead>(p, shared, warp / 4 - 1).run();
  }
}

int num_tickets(const ChunkParams& p) {
  const int tokens = kChunkTile / p.heads_of_tile;
  int tiles = 0;
  for (int c = 0; c < p.num_chunks; ++c) tiles += (p.chunks[c].rows + tokens - 1) / tokens;
  return tiles * (p.heads / p.heads_of_tile);
}

template <int kHead>
void launch_with(const ChunkParams& p, cudaStream_t stream) {
  constexpr int kBytes = int(sizeof(Shared<kHead>)) + 1024;
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = chunk_kernel<kHead>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "paged_attention");
  launch_early("paged_attention", kernel, unsigned(std::min(num_tickets(p), p.sms)), kThreads,
               size_t(kBytes), stream, true, p);
}

}  // namespace

void launch_chunks(int head_dim, const ChunkParams& params, CUstream_st* stream) {
  if (head_dim == 64) return launch_with<64>(params, stream);
  launch_with<128>(params, stream);
}

}  // namespace tandem::gpu::sm90
