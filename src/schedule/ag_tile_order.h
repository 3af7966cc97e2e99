// Order in which a rank's fused AG+GEMM computes its output tiles (FLUX §3.2): tiles of the local
// shard first, the others in the order in which their shards arrive (ag_source in ring.h). Pure
// functions of a position, read by GPU kernels, by the host for them, and by the tests.
//
// Rows are cut into `ranks` shards of `shard_tiles` tiles each, columns into `column_tiles`. The
// first `head` columns of the local shard come first: just enough work to hide the transfer. Then
// all other tiles, column by column, so that a column's weights are read once. With head ==
// column_tiles the shards are computed one after another instead, which waits least if transfers
// are slow.
#pragma once

#include <cstdint>

#include "schedule/tile.h"

namespace tandem::schedule {

struct AgTileOrder {
  int rank = 0, ranks = 1;
  int shard_tiles = 1;
  int column_tiles = 1;
  int head = 1;  ///< 0 to column_tiles

  constexpr int row_tiles() const { return ranks * shard_tiles; }
  constexpr int64_t tiles() const { return int64_t(row_tiles()) * column_tiles; }
};

/// Tile at position `at`, 0 <= at < tiles().
constexpr Tile tile_at(const AgTileOrder& order, int at) {
  const int shard = order.shard_tiles, rows = order.row_tiles();
  // Row `turned` tiles after the local shard's first, modulo all rows.
  const auto rotated = [&](int turned) {
    const int row = order.rank * shard + turned;
    return row >= rows ? row - rows : row;
  };
  if (order.head >= order.column_tiles) {
    const int per_shard = shard * order.column_tiles;
    const int step = at / per_shard, rest = at - step * per_shard;
    return {rotated(step * shard + rest % shard), rest / shard};
  }
  const int local = shard * order.head;
  if (at < local) return {rotated(at % shard), at / shard};
  const int remote_rows = rows - shard, remote = at - local;
  if (remote < remote_rows * order.head)
    return {rotated(shard + remote % remote_rows), remote / remote_rows};
  const int rest = remote - remote_rows * order.head;
  return {rotated(rest % rows), order.head + rest / rows};
}

/// Whether rows of tiles form pairs, each within one shard, or each of two whole shards.
constexpr bool has_pairs_of_rows(const AgTileOrder& order) {
  return order.shard_tiles % 2 == 0 || (order.shard_tiles == 1 && order.ranks % 2 == 0);
}

/// This order over pairs of rows instead of rows.
constexpr AgTileOrder in_pairs_of_rows(AgTileOrder order) {
  if (order.shard_tiles == 1) {
    order.rank /= 2;
    order.ranks /= 2;
  } else {
    order.shard_tiles /= 2;
  }
  return order;
}

/// Shard that a tile waits for.
constexpr int shard_of_row(const AgTileOrder& order, int row_tile) {
  return row_tile / order.shard_tiles;
}

}  // namespace tandem::schedule
