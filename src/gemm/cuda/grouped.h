// Grouped GEMM on one Hopper GPU: each group of rows of x has its own weight. The number of rows of
// a group is only known on the device. Rows are sorted by group, and each group starts at a
// multiple of kGroupedRows, so that a tile belongs to one group; padding rows are computed, too,
// and their results are meaningless. bf16 or f16, f32 accumulation, deterministic. Or e4m3 to bf16:
// x and the weight have a scale per row, applied to the sums before a gate.
//
// The work is partitioned by an earlier kernel (overlap/moe/cuda/permute.h), into a table that
// belongs to the GEMM: schedule/grouped_order.h. A GEMM may have several tables: for column ranges,
// for fewer blocks.
//
// Gathered rows may still be arriving from other ranks: a tile waits for its source ranks. Sorted
// rows may still be written by a kernel that runs concurrently with the GEMM
// (overlap/moe/cuda/expert_rows.h): a tile waits for all of its rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "comm/device/device_signal.h"
#include "gemm/cuda/scale.h"
#include "schedule/grouped_order.h"
#include "tandem/dtype.h"

namespace tandem::gpu {

/// Rows of a tile.
constexpr int kGroupedRows = 128;
/// Columns of a tile that is not gated; for e4m3 half as many (warpgroup_product.cuh).
constexpr int kGroupedColumns = 256;
/// True if pairs of blocks are faster, for sorted rows; for gathered ones they are not. Measured on
/// an H100 (docs/results/gpu-experiments.md).
constexpr bool pairs_are_faster(int64_t rows, int groups, bool e4m3 = false) {
  return rows >= (e4m3 ? 512 : 128) * int64_t(groups);
}
/// Row tiles that are swept together: 1,024 rows.
constexpr int kGroupedBand = 8;

struct GroupedShape {
  DType dtype = DType::bf16;  ///< x, weight and result; for e4m3 the result is bf16
  int groups = 1;
  int64_t rows = 0;  ///< max over all groups together, without padding of their last tiles
  int64_t columns = 0, k = 0;
  /// x's rows are taken from anywhere, by index; otherwise they are sorted.
  bool gathered = false;
  /// A group's weight is [2 x columns, k], the gate's rows, then those of the up projection, and
  /// silu(gate) x up is stored. Otherwise [columns, k].
  bool gated = false;
  /// A group's weight is [k, columns]: computes the gradient of another GEMM's x. Not with
  /// gathered, gated or e4m3.
  bool transposed = false;
  /// A row's bits do not depend on its position: tiles do not alternate the K direction.
  bool fixed_order = false;
  /// Blocks work in pairs, on two row tiles of a group, and share the reads of its weight. If a
  /// group has an odd number of tiles, the last one has no partner: half of a pair's work is
  /// wasted. Not with gathered rows.
  bool paired = false;

  constexpr int64_t weight_rows() const {
    return groups * (transposed ? k : columns * (gated ? 2 : 1));
  }
  constexpr int row_tiles() const { return schedule::max_group_tiles(rows, groups, kGroupedRows); }
  /// Rows of the sorted matrices.
  constexpr int64_t padded_rows() const { return int64_t(row_tiles()) * kGroupedRows; }
};

/// Rows of x with a number below this are in `x`, others in `local`.
constexpr int kLocalRows = 1 << 30;

/// Tiles of a table: all, those with local rows only, or the others.
enum class GroupedTiles : uint8_t { all, local, remote };

/// Part of a GEMM that a table covers.
struct GroupedCut {
  int reserved_blocks = 0;                 ///< kept free for another kernel meanwhile
  schedule::Joining joining = {};          ///< none: they are free until the GEMM ends
  int first_column = 0, column_tiles = 0;  ///< tile indices; 0 column_tiles: all remaining
  /// Orders tiles by the arrival of their rows.
  bool staged = false;
  GroupedTiles tiles = GroupedTiles::all;
  /// Includes the order of row tiles, for a kernel that sorts rows concurrently with the GEMM.
  bool ordered = false;
};

/// Output of the kernel that partitions the work.
struct GroupedTable {
  schedule::GroupedWork* work_items = nullptr;  ///< lists of all blocks, or pairs, consecutively
  schedule::BlockSlots slots;
  int items_of_block = 1;
  int column_tiles = 1;
  int steps = 1;  ///< k-blocks
  int first_column = 0;
  bool staged = false;
  GroupedTiles tiles = GroupedTiles::all;
  int row_tiles = 1;                   ///< per work item; 2 if blocks work in pairs
  schedule::RowSlot* order = nullptr;  ///< order of the row tiles of an ordered table, written too
  schedule::Joining joining = {};      ///< unless none: uses the `rounds` of the turns
};

/// Arrival flags of gathered rows: rows of a source are ready once signal `arrived` + source has
/// this call's epoch. Sources are in the order of schedule::moe_source.
struct GroupedArrivals {
  const uint64_t* arrived = nullptr;  ///< null: all rows are ready
  CallCounter* calls = nullptr;
  Deadline deadline = {};
  OpId op = OpId::wait;
  int rank = 0, ranks = 1;
};

struct GroupedArgs {
  const void* x = nullptr;          ///< [padded rows, k]; gathered: [any, k]
  const int32_t* source = nullptr;  ///< gathered: row of x; below 0: zeros
  const void* weight = nullptr;     ///< [weight rows, k]
  void* out = nullptr;              ///< [padded rows, columns]
  const void* local = nullptr;      ///< gathered: rows numbered from kLocalRows up; not e4m3
  GroupedArrivals arrivals = {};    ///< gathered; not e4m3
  /// Sorted: number of ready rows per row tile; a tile may be read at kGroupedRows. The GEMM then
  /// starts concurrently with the preceding kernel of the stream, which writes the rows.
  const uint32_t* ready = nullptr;
  /// Starts the GEMM concurrently with the preceding kernel of the stream, once all blocks of that
  /// kernel run and have allowed it (concurrent.cuh). The GEMM may read nothing that it writes. Not
  /// with gathered rows.
  bool concurrent = false;
  ScalePointers scales = {};  ///< e4m3: per row of x, by row number, and of the weight
};

class GroupedGemm {
 public:
  virtual ~GroupedGemm() = default;
  /// Adds a table and returns its number; table 0 covers the whole GEMM.
  virtual int add_table(const GroupedCut& cut) = 0;
  virtual const GroupedTable& table(int number = 0) const = 0;
  /// Must follow the kernel that fills the table. Throws InvalidArgument for e4m3 without scales,
  /// or with `local`, `arrivals` or `ready`, and for gathered rows with `ready` or `concurrent`.
  virtual void launch(const GroupedArgs& args, cudaStream_t stream, int table = 0) = 0;
};

/// Throws InvalidArgument for other dtypes, or if columns or k are not multiples of 8 (e4m3: 16).
std::unique_ptr<GroupedGemm> make_grouped_gemm(const GroupedShape& shape);

}  // namespace tandem::gpu
