// Split-K partials of a GEMM whose last wave is split along K (schedule/wave_split.h): helper
// blocks store them in memory, and a tile's owner block adds them.
#pragma once

#include "comm/device/device_signal.cuh"
#include "gemm/cuda/stage_filler.cuh"
#include "gemm/cuda/wait_for_load.cuh"

namespace tandem::gpu::fused {

/// Partials by slot (schedule::TileSteps::partial, and block of the cluster). Each f32 partial is
/// stored as hi + lo in the result type.
template <class Tiles>
struct SplitPartials {
  CUtensorMap map;
  uint64_t* count;  // warpgroups that have stored, by slot; 0 between calls

  static constexpr int kTerms = 2, kSteps = kTerms * Tiles::kStepsOfRows;
  static constexpr int row(int slot, int term) { return (slot * kTerms + term) * Tiles::kTileRows; }
  __device__ static int slot(int partial) {
    return partial * Tiles::kCluster + int(cute::block_rank_in_cluster());
  }
};

/// Deadline and identity for waits.
struct Waiter {
  Deadline deadline;
  OpId op;
  int rank;
};

/// Called by the loading thread: loads the partials of `work`, each once it is stored.
template <class Tiles, class Work>
__device__ void load_partials(StageFiller<Tiles>& stages, const SplitPartials<Tiles>& partials,
                              const Work& work, const Waiter& waiter) {
  using Partials = SplitPartials<Tiles>;
#pragma unroll 1
  for (int step = 0; step < work.reads_partials * Partials::kSteps; ++step) {
    const int slot = Partials::slot(work.partial + step / Partials::kSteps);
    if (step % Partials::kSteps == 0) {
      // Waits for both warpgroups' accumulators; no other thread waits for this slot.
      wait_for_load(partials.count + slot, Tiles::kGroups, waiter.deadline, waiter.op, waiter.rank,
                    slot);
      partials.count[slot] = 0;
    }
    stages.load_rows(partials.map, 0,
                     Partials::row(slot, 0) + step % Partials::kSteps * Tiles::kGroupRows);
  }
}

/// Called by a storing thread: stores its warpgroup's half of a partial.
template <class Storer, class Tiles, class Work>
__device__ void store_partial(Storer& storer, const SplitPartials<Tiles>& partials,
                              const Work& work) {
  using Partials = SplitPartials<Tiles>;
  const int slot = Partials::slot(work.partial);
#pragma unroll 1
  for (int term = 0; term < Partials::kTerms; ++term) {
    storer.store(partials.map, 0, Partials::row(slot, term));
  }
  storer.complete();
  asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(partials.count + slot) : "memory");
}

}  // namespace tandem::gpu::fused
