// The grouped GEMM (grouped.h): a GemmBlock (gemm_block.cuh) on tiles of 128 rows of one group.
// Blocks work singly, or, with sorted rows, in pairs on two adjacent row tiles: then each loads
// half of the weight's rows for both. The helper warp loads gathered rows of x. A tile may be
// gated. Tiles of e4m3 are half as wide.
#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

#include "core/cuda/concurrent.cuh"
#include "gemm/cuda/gemm_launch.cuh"
#include "gemm/cuda/grouped_loads.cuh"
#include "gemm/cuda/grouped_scales.cuh"

namespace tandem::gpu::fused {

struct GroupedForm {
  bool gathers, applies_swiglu, transposes, pairs;
};

/// Additional parameters of a kernel for e4m3.
struct GroupedScaled {
  ScalePointers scales;
  int columns;  // columns of the result
};
struct GroupedUnscaled {};

template <class Operand, class Element, GroupedForm kForm>
struct GroupedRoles {
  // ---- Configuration ---------------------------------------------------------------------------

  using Tiles = GemmTiles<Operand, Element,
                          TileOptions{.cluster = kForm.pairs ? 2 : 1,
                                      .gated = kForm.applies_swiglu,
                                      .weight_transposed = kForm.transposes}>;
  using Shared = typename Tiles::Shared;
  static constexpr bool kFp8 = Tiles::Product::kFp8;
  static_assert(Tiles::kTileRows == kGroupedRows &&
                Tiles::kTileColumns == kGroupedColumns / (kFp8 ? 2 : 1));
  static_assert(!(kForm.pairs && kForm.gathers));  // slower than either, and than sorting first
  static_assert(!(kFp8 && kForm.transposes));  // the tensor cores only take e4m3 contiguous along K

  struct Params : OptionalLog, std::conditional_t<kFp8, GroupedScaled, GroupedUnscaled> {
    CUtensorMap x, weight, out;
    const schedule::GroupedWork* work_items;
    int items_of_cluster;
    int no_row;      // past the last row tile: reads zeros, and is not written
    int group_rows;  // weight rows per group
    int to_high;     // offset in weight rows between the two halves of a tile's columns
    bool alternates;
    const std::byte *rows, *local;  // gathered x
    const int32_t* source;
    int64_t row_bytes;
    GroupedArrivals arrivals;
    const uint32_t* ready;  // sorted x
  };

  struct Work : WholeTile {
    int row, column, group, stage, end;
    __device__ Work(const Params& params, const schedule::GroupedWork& work)
        : row(work.row), column(work.column), group(work.group), stage(work.stage), end(work.end) {
      if constexpr (kForm.pairs) {
        const int number = int(cute::block_rank_in_cluster());
        row = number < work.rows ? row + number : params.no_row;
      }
    }
    __device__ auto tile_coord() const { return cute::make_coord(row, column); }
    /// First row in the weight of the tile's columns, one row per column.
    __device__ int weight_row(const Params& params) const {
      return group * params.group_rows + column * Tiles::kStoredColumns;
    }
  };

  __device__ static void open(const Params& params, Shared&) {
    if (threadIdx.x != 64) return;  // thread of warp 2, which stores and is still idle
    if (!kForm.gathers) cute::prefetch_tma_descriptor(&params.x);
    cute::prefetch_tma_descriptor(&params.weight);
    cute::prefetch_tma_descriptor(&params.out);
  }

  // ---- Loading thread ---------------------------------------------------------------------------

  class Source {
   public:
    static constexpr int kCopyingLanes = kForm.gathers ? 32 : 0;

    __device__ Source(const Params& params, Shared&) : params_(params) {}

    __device__ void begin(const Work& work) {
      low_ = work.weight_row(params_);
      if (!kForm.gathers && params_.ready && !(kForm.pairs && work.row == params_.no_row)) {
        await_rows(params_.ready + work.row);
      }
    }
    __device__ void load_step(StageFiller<Tiles>& stages, const Work& work, int number) const {
      const int step = direction_.step_of(work, number), row = work.row * Tiles::kTileRows;
      if constexpr (kForm.transposes) {
        load_transposed(stages, params_.x, params_.weight, step, row,
                        work.column * Tiles::kTileColumns, work.group);
      } else {
        load_halves<kForm.gathers>(stages, params_.x, params_.weight, step, row, low_,
                                   low_ + params_.to_high);
      }
    }
    __device__ void end(const Work&) {
      if (params_.alternates) direction_.reverse();
    }
    __device__ void close() const {}

    __device__ static auto scales(const Params& params, const Work& work) {
      const int first_row =
          kForm.pairs && work.row == params.no_row ? 0 : work.row * Tiles::kTileRows;
      return GroupedScales<kForm.gathers, kForm.applies_swiglu>{
          params.scales.x + (kForm.gathers ? 0 : first_row), params.source + first_row,
          params.scales.weight + work.weight_row(params),
          params.columns - work.column * Tiles::kStoredColumns, params.to_high};
    }

   private:
    const Params& params_;
    Serpentine direction_;
    int low_;  // first row of the weight for this work item
  };

  // ---- Storing threads --------------------------------------------------------------------------

  class Sink : public DirectSink {
   public:
    using Tile = std::conditional_t<kForm.applies_swiglu, GatedTile<Tiles>, RoundedTile<Tiles>>;

    __device__ Sink(const Params& params, Shared&, int) : params_(params) {}

    __device__ static int write_step(const Work&, int, int box) { return box * Tiles::kEvery; }
    __device__ void store(TileStorer<Tiles>& storer, const Work& work) const {
      storer.store(params_.out, work.column * Tiles::kStoredColumns, work.row * Tiles::kTileRows);
    }

   private:
    const Params& params_;
  };

  // ---- Helper warp: gathers rows ----------------------------------------------------------------

  __device__ static void spare([[maybe_unused]] const Params& params,
                               [[maybe_unused]] Shared& shared) {
    if constexpr (kForm.gathers) RowGatherer<GroupedRoles>::run(params, shared);
  }

  __device__ static void close() {
    if constexpr (!kForm.gathers) end_behind_kernel_before();
  }
};

// ---- Launch ------------------------------------------------------------------------------------

template <class Operand, class Element, GroupedForm kForm>
class Grouped final : public GroupedGemm {
  using Block = GemmBlock<GroupedRoles<Operand, Element, kForm>>;
  using Tiles = typename Block::Tiles;
  /// Rows between the two halves of a tile's columns, in an ungated weight.
  static constexpr int kHalf = Tiles::kTileColumns / 2;
  static constexpr const char* kName = "grouped GEMM";

 public:
  explicit Grouped(const GroupedShape& shape)
      : shape_(shape),
        blocks_(resident_clusters<Block>(kName)),
        column_tiles_(ceil_div(shape.columns, Tiles::kStoredColumns)) {
    add_table({});
  }

  int add_table(const GroupedCut& cut) override {
    GroupedTable table;
    table.row_tiles = Tiles::kCluster;
    table.first_column = cut.first_column;
    table.column_tiles = cut.column_tiles ? cut.column_tiles : column_tiles_ - cut.first_column;
    table.staged = cut.staged;
    table.tiles = cut.tiles;
    // Min k-blocks that hide the store of the previous tile; k-blocks past K read zeros.
    table.steps = std::max(ceil_div(shape_.k, Tiles::kStepOfK), int(Tiles::kLead));
    const int row_items =
        schedule::max_group_tiles(shape_.rows, shape_.groups, Tiles::kCluster * Tiles::kTileRows);
    const int64_t tiles = int64_t(row_items) * table.column_tiles;
    const int early = std::max(1, blocks_ - ceil_div(cut.reserved_blocks, Tiles::kCluster));
    table.joining = cut.joining;
    table.slots = {cut.joining.any() ? blocks_ : early, early, 0};
    // However late the other blocks join, the early ones have at most all tiles.
    table.items_of_block = ceil_div(tiles, early) + 1;
    work_items_.emplace_back(size_t(table.slots.blocks) * size_t(table.items_of_block) *
                             sizeof(schedule::GroupedWork));
    table.work_items = reinterpret_cast<schedule::GroupedWork*>(work_items_.back().data());
    if (cut.ordered) {
      work_items_.emplace_back(size_t(row_items + schedule::kOrderHead) *
                               sizeof(schedule::RowSlot));
      table.order = reinterpret_cast<schedule::RowSlot*>(work_items_.back().data());
    }
    tables_.push_back(table);
    return int(tables_.size()) - 1;
  }
  const GroupedTable& table(int number) const override { return tables_[size_t(number)]; }

  void launch(const GroupedArgs& args, cudaStream_t stream, int number) override {
    if constexpr (Tiles::Product::kFp8) check_scaled(args);
    if constexpr (kForm.gathers) check_gathered(args);
    if (shape_.rows == 0) return;
    const Addresses addresses{args.x, args.weight, args.out};
    if (!last_ || !(addresses == *last_)) {
      prepare(args);
      last_ = addresses;
    }
    const GroupedTable& table = tables_[size_t(number)];
    params_.work_items = table.work_items;
    params_.items_of_cluster = table.items_of_block;
    params_.local = static_cast<const std::byte*>(args.local ? args.local : args.x);
    params_.source = args.source;
    params_.arrivals = args.arrivals;
    params_.ready = args.ready;
    if constexpr (Tiles::Product::kFp8) params_.scales = args.scales;
    launch_gemm<Block>(params_, table.slots.blocks, kName, stream, args.concurrent || args.ready);
  }

 private:
  struct Addresses {
    const void *x, *weight, *out;
    bool operator==(const Addresses&) const = default;
  };

  static int ceil_div(int64_t all, int divisor) { return int((all + divisor - 1) / divisor); }

  static void check_scaled(const GroupedArgs& args) {
    if (!args.scales.x || !args.scales.weight) {
      throw InvalidArgument(
          "grouped GEMM: scales: expected those of e4m3 rows of x and the weight");
    }
    if (args.local || args.arrivals.arrived || args.ready) {
      throw InvalidArgument("grouped GEMM: e4m3 rows: expected all of them in x, before the call");
    }
  }

  static void check_gathered(const GroupedArgs& args) {
    if (args.ready || args.concurrent) {
      throw InvalidArgument("grouped GEMM: concurrent with a kernel: expected sorted rows");
    }
  }

  void prepare(const GroupedArgs& args) {
    if (!kForm.gathers) {
      params_.x = map_of<Operand>(args.x, shape_.padded_rows(), shape_.k, Tiles::kTileRows);
    }
    params_.weight = kForm.transposes
                         ? map_matrices(args.weight, dtype_of<Operand>(), shape_.groups, shape_.k,
                                        shape_.columns, Tiles::kStepOfK)
                         : map_of<Operand>(args.weight, shape_.weight_rows(), shape_.k, kHalf);
    params_.out =
        map_of<Element>(args.out, shape_.padded_rows(), shape_.columns, Tiles::kGroupRows);
    params_.group_rows = int(shape_.weight_rows() / shape_.groups);
    params_.no_row = shape_.row_tiles();
    params_.to_high = kForm.applies_swiglu ? int(shape_.columns) : kHalf;
    params_.alternates = !shape_.fixed_order;
    params_.rows = static_cast<const std::byte*>(args.x);
    params_.row_bytes = shape_.k * int64_t(sizeof(Operand));
    if constexpr (Tiles::Product::kFp8) params_.columns = int(shape_.columns);
  }

  GroupedShape shape_;
  int blocks_, column_tiles_;  // blocks, or pairs of blocks
  std::vector<GroupedTable> tables_;
  std::vector<DeviceMemory> work_items_;  ///< and orders
  typename Block::Params params_{};
  std::optional<Addresses> last_;  // addresses in params_
};

template <class Operand, class Element, bool kPairs>
std::unique_ptr<GroupedGemm> make_grouped(const GroupedShape& shape) {
  const auto make = [&]<bool kGathers, bool kAppliesSwiglu, bool kTransposes>() {
    constexpr GroupedForm kForm{kGathers, kAppliesSwiglu, kTransposes, kPairs};
    return std::unique_ptr<GroupedGemm>(std::make_unique<Grouped<Operand, Element, kForm>>(shape));
  };
  if constexpr (!WarpgroupProduct<Operand>::kFp8) {
    if (shape.transposed) return make.template operator()<false, false, true>();
  }
  if constexpr (!kPairs) {
    if (shape.gathered) {
      if (shape.gated) return make.template operator()<true, true, false>();
      return make.template operator()<true, false, false>();
    }
  }
  if (shape.gated) return make.template operator()<false, true, false>();
  return make.template operator()<false, false, false>();
}

}  // namespace tandem::gpu::fused
