// Tile order of a grouped GEMM: rows are sorted by group (in a Mixture-of-Experts layer: by
// expert), and each group begins at a multiple of the tile height, so that a tile has rows of one
// group. Groups follow one another; within one, `band` row tiles at a time are swept column by
// column, so that concurrent blocks read few rows of x and few of the group's weight. Pure
// functions, for the kernel that builds the work table and for the tests.
#pragma once

#include <cstdint>

#include "schedule/tile.h"

namespace tandem::schedule {

/// Row tiles of a group of `rows`.
constexpr int group_tiles(int64_t rows, int tile_rows) {
  return int((rows + tile_rows - 1) / tile_rows);
}

/// Complete row tiles of a group of `rows`, of which the first `arrived` have arrived.
constexpr int arrived_tiles(int64_t arrived, int64_t rows, int tile_rows) {
  return arrived == rows ? group_tiles(rows, tile_rows) : int(arrived / tile_rows);
}

/// Max row tiles of all groups, however `rows` are distributed over them.
constexpr int max_group_tiles(int64_t rows, int groups, int tile_rows) {
  const int64_t begun = rows < groups ? rows : groups;  // groups that have rows
  return int((rows + begun * (tile_rows - 1)) / tile_rows);
}

/// Tile number `at` of a group with `row_tiles`, relative to its first row.
constexpr Tile grouped_tile(int at, int row_tiles, int column_tiles, int band) {
  const int first = at / (band * column_tiles) * band;
  const int rows = row_tiles - first < band ? row_tiles - first : band;
  const int rest = at - first * column_tiles;
  return {first + rest % rows, rest / rows};
}

/// Blocks, or pairs of blocks, that take tiles round-robin. Those from `early` on join once each of
/// the others has had `rounds`: until then another kernel has their SMs.
struct BlockSlots {
  int blocks = 1, early = 1, rounds = 0;
};
/// Block of the tile at `position`, and its index among that block's work items.
struct BlockSlot {
  int block = 0, slot = 0;
};
constexpr BlockSlot slot_of(int position, const BlockSlots& of) {
  const int before = of.early * of.rounds, rest = position - before;
  if (rest < 0) return {position % of.early, position / of.early};
  const int block = rest % of.blocks;
  return {block, rest / of.blocks + (block < of.early ? of.rounds : 0)};
}
/// Number of work items of `block`, of `tiles` in all.
constexpr int slots_of(int block, int tiles, const BlockSlots& of) {
  const auto slots = [block](int count, int blocks) {
    return block < count ? (count - 1 - block) / blocks + 1 : 0;
  };
  const int before = tiles < of.early * of.rounds ? tiles : of.early * of.rounds;
  return (block < of.early ? slots(before, of.early) : 0) + slots(tiles - before, of.blocks);
}

/// Estimate of the tiles per early block before the remaining blocks can join, since another kernel
/// occupies their SMs. Depends on a call's counts, known only on the device.
struct Joining {
  float of_row = 0;          ///< per row of all groups
  float of_leaving = 0;      ///< per row sent to another rank, in addition
  float min_of_leaving = 0;  ///< min, per row sent

  constexpr bool any() const { return of_row > 0 || of_leaving > 0 || min_of_leaving > 0; }
  /// BlockSlots::rounds for `tiles`; at most, all are taken by the early blocks.
  constexpr int rounds(int rows, int leaving, int tiles, int early) const {
    const float sum = of_row * float(rows) + of_leaving * float(leaving),
                minimum = min_of_leaving * float(leaving), after = sum > minimum ? sum : minimum;
    const int maximum = (tiles + early - 1) / early;
    if (after >= float(maximum)) return maximum;
    const int whole = int(after);
    return whole + (float(whole) < after);
  }
};

/// Rows of a group, in device memory. The last entry of a table, after those of all groups, has no
/// rows; its `first` is the number of rows including tile padding.
struct GroupRows {
  int first = 0, rows = 0;
};

/// Work item of a block, in device memory. None if `end` is 0.
struct GroupedWork {
  int row = 0;         ///< in tiles, over all groups' rows
  int16_t rows = 1;    ///< row tiles: 2 for a pair of blocks, 1 for a group's last row if it has no
                       ///< partner
  int16_t column = 0;  ///< in tiles, within a group's columns
  int16_t group = 0;
  int16_t stage = 0;  ///< last of the arrivals that contain its rows
  int end = 0;        ///< k-blocks
};

/// Row tiles of one work item, in the order in which a table's items first read them. The table
/// begins with two header entries, whose `row` is the number of entries and the number of chunks of
/// rows taken so far.
struct RowSlot {
  int row = 0;       ///< in tiles
  int16_t rows = 0;  ///< row tiles
  int16_t stage = 0;
};

/// Number of header entries.
constexpr unsigned kOrderHead = 2;

}  // namespace tandem::schedule
