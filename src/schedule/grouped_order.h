// The tiles of a grouped GEMM: rows are sorted by group (of a Mixture-of-Experts layer: by expert),
// and each group's begin at a multiple of a tile's, so that a tile has rows of one group. Groups
// follow one another; within one, `band` row tiles at a time are swept column by column, so that
// blocks which run at the same time read few rows of x and few of the group's weight. Pure
// functions, for the kernel that makes the table of works and for the tests.
#pragma once

#include <cstdint>

#include "schedule/tile.h"

namespace tandem::schedule {

/// Row tiles of a group of `rows`.
constexpr int group_tiles(int64_t rows, int tile_rows) {
  return int((rows + tile_rows - 1) / tile_rows);
}

/// Row tiles of a group of `rows` whose rows are all there, where the first `arrived` are.
constexpr int arrived_tiles(int64_t arrived, int64_t rows, int tile_rows) {
  return arrived == rows ? group_tiles(rows, tile_rows) : int(arrived / tile_rows);
}

/// Row tiles of all groups, at most, however `rows` are spread over them.
constexpr int most_group_tiles(int64_t rows, int groups, int tile_rows) {
  const int64_t begun = rows < groups ? rows : groups;  // groups that have rows
  return int((rows + begun * (tile_rows - 1)) / tile_rows);
}

/// Tile number `at` of a group with `row_tiles`, from its first row on.
constexpr Tile grouped_tile(int at, int row_tiles, int column_tiles, int band) {
  const int first = at / (band * column_tiles) * band;
  const int rows = row_tiles - first < band ? row_tiles - first : band;
  const int rest = at - first * column_tiles;
  return {first + rest % rows, rest / rows};
}

/// Blocks, or pairs of blocks, that take tiles by turns. Those from `early` on join when each of
/// the others has had `rounds`: until then something else has their SMs.
struct BlockTurns {
  int blocks = 1, early = 1, rounds = 0;
};
/// Which block has the tile at `position` of all, and as which of its works.
struct BlockTurn {
  int block = 0, turn = 0;
};
constexpr BlockTurn turn_of(int position, const BlockTurns& of) {
  const int before = of.early * of.rounds, rest = position - before;
  if (rest < 0) return {position % of.early, position / of.early};
  const int block = rest % of.blocks;
  return {block, rest / of.blocks + (block < of.early ? of.rounds : 0)};
}
/// Works of `block`, of `tiles` in all.
constexpr int turns_of(int block, int tiles, const BlockTurns& of) {
  const auto turns = [block](int count, int blocks) {
    return block < count ? (count - 1 - block) / blocks + 1 : 0;
  };
  const int before = tiles < of.early * of.rounds ? tiles : of.early * of.rounds;
  return (block < of.early ? turns(before, of.early) : 0) + turns(tiles - before, of.blocks);
}

/// When blocks join that something else needed before: how many tiles each of the others has had
/// by then. That follows from a call's counts, which the device alone knows.
struct Joining {
  float of_row = 0;            ///< for each row of all groups
  float of_leaving = 0;        ///< and for each row that leaves for another rank
  float least_of_leaving = 0;  ///< at least, of those alone

  constexpr bool any() const { return of_row > 0 || of_leaving > 0 || least_of_leaving > 0; }
  /// BlockTurns::rounds of `tiles`, of which all are dealt to the early blocks at most.
  constexpr int rounds(int rows, int leaving, int tiles, int early) const {
    const float sum = of_row * float(rows) + of_leaving * float(leaving),
                least = least_of_leaving * float(leaving), after = sum > least ? sum : least;
    const int most = (tiles + early - 1) / early;
    if (after >= float(most)) return most;
    const int whole = int(after);
    return whole + (float(whole) < after);
  }
};

/// Where a group's rows are, in the device's memory. The last of a table, behind those of all
/// groups, has no rows; its `first` is how many rows there are with what fills tiles up.
struct GroupRows {
  int first = 0, rows = 0;
};

/// What a block does at a time, in the device's memory. None where `end` is 0.
struct GroupedWork {
  int row = 0;         ///< in tiles, of all groups' rows
  int16_t rows = 1;    ///< row tiles: 2 of a pair of blocks, 1 where a group's last has no other
  int16_t column = 0;  ///< in tiles, of a group's columns
  int16_t group = 0;
  int16_t stage = 0;  ///< the last of the arrivals that its rows are from
  int end = 0;        ///< k-blocks
};

/// Row tiles of one work, in the order in which a table's works first read them. Two are
/// before the first one: `row` is how many there are, and how many pieces of them have been taken.
struct RowTurn {
  int row = 0;       ///< in tiles
  int16_t rows = 0;  ///< row tiles
  int16_t stage = 0;
};

/// Those before the first one.
constexpr unsigned kOrderHead = 2;

}  // namespace tandem::schedule
