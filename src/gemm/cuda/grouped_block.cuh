// What a block of the grouped GEMM does: product_block.cuh's roles, on tiles of 128 rows of one
// group. Blocks work alone, or, where rows lie sorted, in pairs on two row tiles that follow one
// another: then each loads half of the weight's rows for both. Gathered rows of x are brought by
// the spare warp, 16 bytes a lane (cp.async), into the layout that TMA would have made of them.
// Tiles of e4m3 are half as wide.
#pragma once

#include "core/cuda/beside.cuh"
#include "gemm/cuda/grouped_gate.cuh"
#include "gemm/cuda/grouped_scales.cuh"
#include "gemm/cuda/product_block.cuh"

namespace tandem::gpu::fused {

template <bool kGathers, bool kGates, bool kTransposes, bool kPairs>
struct GroupedForm {
  static constexpr int kCluster = kPairs ? 2 : 1;
  static constexpr bool kGathered = kGathers, kGated = kGates, kTransposed = kTransposes;
};

/// What a kernel for e4m3 has beside the rest.
struct GroupedScaled {
  ScalePointers scales;
  int columns;  // of the result
};
struct GroupedUnscaled {};

template <class Operand, class Element, class Form>
struct GroupedBlock : ProductBlock<Operand, Element, 2, 0, Form> {
  using Base = ProductBlock<Operand, Element, 2, 0, Form>;
  static constexpr bool kGathers = Form::kGathered, kGates = Form::kGated,
                        kTransposes = Form::kTransposed, kPairs = Form::kCluster == 2;
  using Base::kTileColumns, Base::kTileRows, Base::kStoredColumns, Base::kStages;
  using typename Base::Shared;
  static constexpr bool kFp8 = WarpgroupProduct<Operand>::kFp8;
  static_assert(kTileRows == kGroupedRows && kTileColumns == kGroupedColumns / (kFp8 ? 2 : 1));
  static_assert(!(kPairs && kGathers));   // slower than both alone, and than sorting first
  static_assert(!(kFp8 && kTransposes));  // the tensor cores take e4m3 along K alone
  /// From the first half of a tile's columns to the second, in rows of an ungated weight.
  static constexpr int kHalf = kTileColumns / 2;

  struct Params : OptionalLog, std::conditional_t<kFp8, GroupedScaled, GroupedUnscaled> {
    CUtensorMap x, weight, out;
    const schedule::GroupedWork* works;
    int works_of_cluster;
    int no_row;      // behind the last row tile: reads zeros, and is not written
    int group_rows;  // of the weight
    int to_high;     // from a tile's first row of the weight to that of the columns' second half
    bool alternates;
    const std::byte *rows, *own;  // gathered x
    const int32_t* source;
    int64_t row_bytes;
    GroupedGate gate;
    const uint32_t* ready;  // sorted x
  };

  struct Work {
    int row, column, group, stage, end;
    static constexpr int begin = 0, reads_partials = 0, partial = 0;
    static constexpr bool writes_partial = false;
    schedule::AddingOrder adding;
    __device__ Work(const Params& params, const schedule::GroupedWork& work)
        : row(work.row), column(work.column), group(work.group), stage(work.stage), end(work.end) {
      if constexpr (kPairs) {
        const int number = int(cute::block_rank_in_cluster());
        row = number < work.rows ? row + number : params.no_row;
      }
      adding = {end, 0, Base::kLead};
    }
    __device__ auto tile_coord() const { return cute::make_coord(row, column); }
    __device__ static int store_step(int, int box) { return box * Base::kEvery; }
    /// Where the tile's columns begin in the weight, a row for each.
    __device__ int weight_row(const Params& params) const {
      return group * params.group_rows + column * kStoredColumns;
    }
    __device__ auto scales(const Params& params) const {
      const int first_row = kPairs && row == params.no_row ? 0 : row * kTileRows;
      return GroupedScales<kGathers, kGates>{
          params.scales.x + (kGathers ? 0 : first_row), params.source + first_row,
          params.scales.weight + weight_row(params), params.columns - column * kStoredColumns,
          params.to_high};
    }
  };

  /// Also of transposed weights, one matrix after the other.
  struct Loader : Base::Loader {
    using Base::Loader::Loader, Base::Loader::shared_, Base::Loader::state_, Base::Loader::half_,
        Base::Loader::kNormal;
    __device__ void load_transposed_step(const CUtensorMap& x, const CUtensorMap& weight, int step,
                                         int row, int column, int matrix) {
      constexpr int kColumns = kStepBytes / int(sizeof(Operand));
      uint64_t* const full = this->begin(Base::kXBytes + Base::kWeightBytes);
      cute::SM90_TMA_LOAD_2D::copy(&x, full, kNormal, shared_.x[state_.index],
                                   step * Base::kStepOfK, row);
      constexpr int kBoxes = int(Base::kWeightBytes / kTransposedBox) / Base::kCluster;
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        const int box = kPairs ? half_ * kBoxes + i : i;
        std::byte* const to = shared_.weight[state_.index] + box * kTransposedBox;
        if constexpr (kPairs) {
          cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&weight, full, uint16_t(3), kNormal, to,
                                                 column + box * kColumns, step * Base::kStepOfK,
                                                 matrix);
        } else {
          cute::SM90_TMA_LOAD_3D::copy(&weight, full, kNormal, to, column + box * kColumns,
                                       step * Base::kStepOfK, matrix);
        }
      }
      state_.advance();
    }
  };

  __device__ static void load(const Params& params, Shared& shared) {
    Loader loader(shared);
    Base::template for_each_work<Work>(params, [&](const Work& work) {
      [[maybe_unused]] const int low = work.weight_row(params);
      if (!kGathers && params.ready && !(kPairs && work.row == params.no_row)) {
        await_rows(params.ready + work.row);
      }
#pragma unroll 1
      for (int number = 0; number < work.end; ++number) {
        const int step = loader.step_of(work, number);
        if constexpr (kTransposes) {
          loader.load_transposed_step(params.x, params.weight, step, work.row * kTileRows,
                                      work.column * kTileColumns, work.group);
        } else {
          loader.load_step(params.x, params.weight, step, work.row * kTileRows, low,
                           low + params.to_high);
        }
      }
      if (params.alternates) loader.alternate_direction();
    });
  }

  /// The loading thread's other half: the same k-blocks in the same order.
  __device__ static void gather(const Params& params, Shared& shared) {
    if constexpr (kGathers) {
      constexpr int kRowsAtATime = 4, kPasses = kTileRows / kRowsAtATime;
      const int lane = int(threadIdx.x) % 32, first = lane / 8, chunk = lane % 8;
      // Chunks are permuted by the row's number among eight: two passes.
      const uint32_t even = first * 128 + ((chunk ^ first) << 4),
                     odd = (first + kRowsAtATime) * 128 + ((chunk ^ (first + kRowsAtATime)) << 4);
      PipelineState<kStages> filling;
      int awaited = 0;
      bool reversed = false;
      Base::template for_each_work<Work>(params, [&](const Work& work) {
        if (params.gate.arrived && awaited < work.stage) {
          await_sources(params.gate, awaited, work.stage, lane);
          awaited = work.stage;
        }
        int source[kTileRows / 32];  // of rows lane, lane + 32, ...
#pragma unroll
        for (int i = 0; i < kTileRows / 32; ++i) {
          source[i] = __ldg(params.source + work.row * kTileRows + 32 * i + lane);
        }
#pragma unroll 1
        for (int number = 0; number < work.end; ++number) {
          const int step = reversed ? work.end - 1 - number : number;
          const int64_t at = int64_t(step) * kStepBytes + chunk * 16;
          const bool inside = at < params.row_bytes;
          // Own rows' numbers lead to them, too. Both are sums, as the compiler would choose
          // between parameters by an indexed load.
          const std::byte* const chunks = params.rows + at;
          [[maybe_unused]] const std::byte* const own =
              params.own + (at - kOwnRows * params.row_bytes);
          shared.empty[filling.index].wait(filling.phase ^ 1);
          const uint32_t to = Base::address_of(shared.x[filling.index]);
#pragma unroll
          for (int i = 0; i < kPasses; ++i) {
            constexpr int kPassesOf32 = 32 / kRowsAtATime;
            const int row =
                __shfl_sync(~0u, source[i / kPassesOf32], i % kPassesOf32 * kRowsAtATime + first);
            const bool there = inside && row >= 0;
            const std::byte* const from =
                (!kFp8 && row >= kOwnRows ? own : chunks) +
                uint64_t(uint32_t(max(row, 0))) * uint32_t(params.row_bytes);
            copy_16(to + (i % 2 ? odd : even) + i / 2 * (2 * kRowsAtATime * 128), from, there);
          }
          // This lane's part of the stage has arrived once its copies have.
          asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                           Base::address_of(&shared.full[filling.index]))
                       : "memory");
          filling.advance();
        }
        reversed = reversed != params.alternates;
      });
    }
  }

  __device__ static void store(const Params& params, Shared& shared, int group) {
    typename Base::Storer storer(shared, group);
    Base::template for_each_work<Work>(params, [&](const Work& work) {
      storer.store(params.out, work.column * kStoredColumns, work.row * kTileRows);
    });
  }

  __device__ static void run(const Params& params, std::byte* memory) {
    Shared& shared = Base::template aligned<Shared>(memory);
    if (threadIdx.x == 64) {  // of warp 2, which stores: nothing is finished yet
      if (!kGathers) cute::prefetch_tma_descriptor(&params.x);
      cute::prefetch_tma_descriptor(&params.weight);
      cute::prefetch_tma_descriptor(&params.out);
    }
    Base::template run<Work>(
        params, shared, [&] { load(params, shared); },
        [&](int group) { store(params, shared, group); }, [&] { gather(params, shared); });
    if constexpr (!kGathers) end_behind_kernel_before();
  }

  static constexpr int kSharedBytes = int(sizeof(Shared)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);

 private:
  /// Until all rows of a tile are in place, for this thread's TMA loads. Bounded: the kernel that
  /// puts them there runs already, and ends.
  __device__ static void await_rows(const uint32_t* ready) {
    uint32_t rows;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(rows) : "l"(ready) : "memory");
    } while (rows < kGroupedRows);
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  /// Zeros where nothing is `there`.
  __device__ static void copy_16(uint32_t to, const std::byte* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
  }
};

}  // namespace tandem::gpu::fused
