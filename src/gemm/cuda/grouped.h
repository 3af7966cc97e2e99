// Grouped GEMM on one Hopper GPU: each group of rows of x has a weight of its own. How many rows a
// group has is known on the device alone. Rows are sorted by group, and each group's begin at a
// multiple of kGroupedRows, so that a tile is of one group; what lies between is computed, too, and
// means nothing. bf16 or f16, f32 accumulation, deterministic. Or e4m3 to bf16: x and the weight
// have a scale for each row, which sums are multiplied by before a gate sees them.
//
// The work is cut by a kernel that runs before (overlap/moe/cuda/permute.h), into a table that
// belongs to the product: schedule/grouped_order.h. A product may have several of them: for parts
// of its columns, for fewer blocks.
//
// Gathered rows may still be arriving from other ranks: a tile waits for those that it has rows of.
// Sorted rows may still be being put into place by a kernel that runs beside the product
// (overlap/moe/cuda/expert_rows.h): a tile waits for all rows of its own.
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
/// Columns of a tile that is not gated; of e4m3 half as many (warpgroup_product.cuh).
constexpr int kGroupedColumns = 256;
/// Whether blocks are faster in pairs, of sorted rows; of gathered ones they are not. Measured on
/// an H100 (docs/dev/gpu-findings.md).
constexpr bool pairs_are_faster(int64_t rows, int groups, bool e4m3 = false) {
  return rows >= (e4m3 ? 512 : 128) * int64_t(groups);
}
/// Row tiles that are swept together: 1,024 rows.
constexpr int kGroupedBand = 8;

struct GroupedShape {
  DType dtype = DType::bf16;  ///< of x and the weight; the result's too, or bf16 of e4m3
  int groups = 1;
  int64_t rows = 0;  ///< of all groups, at most, without what fills up their last tiles
  int64_t columns = 0, k = 0;
  /// x's rows are taken from anywhere, by number; else they lie sorted.
  bool gathered = false;
  /// A group's weight is [2 x columns, k]: the gate's rows, then those of the up projection; stored
  /// is silu(gate) x up. Else [columns, k].
  bool gated = false;
  /// A group's weight is [k, columns]: the gradient of another product's x. Neither gathered nor
  /// gated nor e4m3.
  bool transposed = false;
  /// A row's bits do not depend on where it stands: tiles do not alternate the K direction.
  bool fixed_order = false;
  /// Blocks work in pairs, on two row tiles of a group, and share what they read of its weight. The
  /// last tile of a group with an odd number of them has no other: half of a pair's work is lost.
  /// Not of gathered rows.
  bool paired = false;

  constexpr int64_t weight_rows() const {
    return groups * (transposed ? k : columns * (gated ? 2 : 1));
  }
  constexpr int row_tiles() const { return schedule::most_group_tiles(rows, groups, kGroupedRows); }
  /// Rows that the sorted matrices have.
  constexpr int64_t padded_rows() const { return int64_t(row_tiles()) * kGroupedRows; }
};

/// Rows of x below this number are `x`'s, others `own`'s.
constexpr int kOwnRows = 1 << 30;

/// Which tiles a table has: all, those with rows of this rank alone, or the others.
enum class GroupedTiles : uint8_t { all, own, others };

/// What a table has of a product.
struct GroupedCut {
  int spare_blocks = 0;                    ///< that something else needs meanwhile
  schedule::Joining joining = {};          ///< none: it needs them until the product ends
  int first_column = 0, column_tiles = 0;  ///< in tiles; 0: all that follow
  /// Tiles whose rows arrive first come first.
  bool staged = false;
  GroupedTiles tiles = GroupedTiles::all;
  /// With the order of row tiles, for a kernel that sorts rows beside the product.
  bool ordered = false;
};

/// Where the kernel that cuts the work puts it.
struct GroupedTable {
  schedule::GroupedWork* works = nullptr;  ///< of every block, or pair, one after the other
  schedule::BlockTurns turns;
  int works_of_block = 1;
  int column_tiles = 1;
  int steps = 1;  ///< k-blocks
  int first_column = 0;
  bool staged = false;
  GroupedTiles tiles = GroupedTiles::all;
  int row_tiles = 1;                   ///< of a work; 2 where blocks work in pairs
  schedule::RowTurn* order = nullptr;  ///< of an ordered table, written, too
  schedule::Joining joining = {};      ///< unless none: of the turns' `rounds`
};

/// Until when gathered rows are there: signal `arrived` + source has this call's epoch. Sources
/// come in the order of schedule::moe_source.
struct GroupedGate {
  const uint64_t* arrived = nullptr;  ///< none: they are
  CallCounter* calls = nullptr;
  Watch watch = {};
  OpId op = OpId::wait;
  int rank = 0, ranks = 1;
};

struct GroupedJob {
  const void* x = nullptr;          ///< [padded rows, k]; gathered: [any, k]
  const int32_t* source = nullptr;  ///< gathered: which row of x; below 0: zeros
  const void* weight = nullptr;     ///< [weight rows, k]
  void* out = nullptr;              ///< [padded rows, columns]
  const void* own = nullptr;        ///< gathered: rows with numbers from kOwnRows on; not e4m3
  GroupedGate gate = {};            ///< gathered; not e4m3
  /// Sorted: rows of each row tile that are in place, kGroupedRows when it may be read. Then the
  /// product begins beside the kernel before it in the stream, which puts them there.
  const uint32_t* ready = nullptr;
  /// The product begins beside the kernel before it in the stream, once all blocks of that run and
  /// have allowed it (beside.cuh). It reads nothing that this one writes. Not gathered.
  bool beside = false;
  ScalePointers scales = {};  ///< e4m3: of each row of x, by its number, and of the weight
};

class GroupedGemm {
 public:
  virtual ~GroupedGemm() = default;
  /// Table 0 has all of the product.
  virtual int add_table(const GroupedCut& cut) = 0;
  virtual const GroupedTable& table(int number = 0) const = 0;
  /// Behind the kernel that fills the table. Throws InvalidArgument for e4m3 without scales, or
  /// with `own`, `gate` or `ready`, and for gathered rows with `ready` or `beside`.
  virtual void launch(const GroupedJob& job, cudaStream_t stream, int table = 0) = 0;
};

/// Throws InvalidArgument for other dtypes, and where columns or k are not multiples of 8 (e4m3: of
/// 16).
std::unique_ptr<GroupedGemm> make_grouped_gemm(const GroupedShape& shape);

}  // namespace tandem::gpu
