// How persistent clusters take the tiles of a GEMM in turn, a wave at a time, and how the last wave
// is split along K where it would leave clusters idle: the cluster that has a tile does the
// beginning, adds what is left to add and stores it; helpers do the rest, a piece at a time, and
// store split-K partials, for the first one to add. Tiles and helpers come in small groups,
// up to ten tiles to a helper or three helpers to a tile. So there are a few fronts along K, and
// clusters still read the same operands at the same time: with equal runs of steps that begin
// anywhere, as in stream-K, they did not, and that cost more than it gained.
//
// Where helpers can, they do their pieces before the last of their own tiles, so that nobody waits.
//
// Pure functions, for the host, which hands kernels their works, and the tests. Never circular: a
// split tile waits for helpers, which wait for no helper.
#pragma once

namespace tandem::schedule {

/// Of the last wave, by groups of `tiles` that share `helpers`; none where tiles is 0. With two
/// helpers or more, `helpers` differs from `tiles` by one, or there is one tile.
struct WaveSplit {
  int tiles = 0, helpers = 1;
  int begin = 0;   ///< steps along K of a tile that no helper does
  int middle = 0;  ///< where the second piece of a tile begins, if it has two or more
};

/// Tiles and the clusters that take them.
struct Waves {
  int tiles = 1, clusters = 1;
  int steps = 1;  ///< of a tile along K
  int added = 0;  ///< steps of a tile of the last wave that add something else
  int least = 1;  ///< steps along K that a cluster does at least at a time
  int rest = 0;   ///< tiles of the last wave, if that may be split
  /// Helpers do their pieces before their tile of the wave before, of which there is one.
  bool before = false;
};

/// Some steps along K of a tile of a group, and which of the group's helpers does them.
struct SplitPiece {
  int tile = 0, helper = 0;
  int begin = 0, end = 0;
};

/// Whether each of the group's tiles has a helper of its own and one that all of them share. Else
/// one tile is shared by all helpers, and each other tile has its own.
constexpr bool helper_is_shared(const WaveSplit& split) {
  return split.tiles > 1 && split.tiles < split.helpers;
}

/// Pieces of the group's tile number `tile`.
constexpr int pieces_of(const WaveSplit& split, int tile) {
  if (helper_is_shared(split)) return 2;
  return split.helpers > 1 && tile + 1 == split.tiles ? split.helpers : 1;
}

/// Those of the group's tiles before number `tile`.
constexpr int pieces_before(const WaveSplit& split, int tile) {
  int pieces = 0;
  for (int t = 0; t < tile; ++t) pieces += pieces_of(split, t);
  return pieces;
}

/// Number `piece` of the group's tile number `tile`.
constexpr SplitPiece piece_of(const WaveSplit& split, int steps, int tile, int piece) {
  const int pieces = pieces_of(split, tile), rest = steps - split.middle;
  // All but the first are equal.
  const auto bound = [&](int number) {
    return number == 0 ? split.begin : split.middle + (number - 1) * rest / (pieces - 1);
  };
  const int end = piece + 1 == pieces ? steps : bound(piece + 1);
  int helper = split.helpers > 1 ? tile : 0;
  if (pieces > 1 && !helper_is_shared(split)) helper = piece;
  if (piece == 1 && helper_is_shared(split)) helper = split.helpers - 1;
  return {tile, helper, bound(piece), end};
}

/// The split of the last wave that ends soonest, if it gains anything worth it. Times are in tenths
/// of a step along K, as measured of bf16: adding 64 received rows, storing a partial, the time
/// until it is seen, adding it, what a split must gain. Of e4m3 a step takes half as long.
constexpr WaveSplit best_split(const Waves& waves) {
  constexpr int kStep = 10, kAddRows = 7, kWritePartial = 70, kSeen = 30, kAddPartial = 40,
                kWorth = 40;
  constexpr int kGroups[][2] = {{1, 1}, {2, 1},  {3, 1}, {4, 1}, {5, 1}, {6, 1},
                                {8, 1}, {10, 1}, {3, 2}, {2, 3}, {1, 2}, {1, 3}};
  int soonest = waves.steps * kStep - kWorth;
  WaveSplit best;
  const auto consider = [&](const WaveSplit& split) {
    int helped = 0, reads_partials = 0;
    for (int helper = 0; helper < split.helpers; ++helper) {
      int busy = 0;
      for (int tile = 0; tile < split.tiles; ++tile) {
        const int pieces = pieces_of(split, tile);
        reads_partials = pieces > reads_partials ? pieces : reads_partials;
        for (int i = 0; i < pieces; ++i) {
          const SplitPiece piece = piece_of(split, waves.steps, tile, i);
          if (piece.end - piece.begin < waves.least) return;
          if (piece.helper == helper) busy += (piece.end - piece.begin) * kStep + kWritePartial;
        }
      }
      helped = busy > helped ? busy : helped;
    }
    // Rows would be added in a wave that is whole, too.
    const int done = split.begin * kStep + waves.added * kAddRows,
              adding = reads_partials * kAddPartial;
    const int waited = waves.before ? 0 : helped + kSeen;
    const int finished = (waited > done ? waited : done) + adding;
    const int end = (finished > helped ? finished : helped) - waves.added * kAddRows;
    if (end >= soonest) return;
    soonest = end;
    best = split;
  };
  if (waves.rest == 0) return best;
  for (const auto& [tiles, helpers] : kGroups) {
    const int groups = (waves.rest + tiles - 1) / tiles;
    if (waves.rest + groups * helpers > waves.clusters) continue;
    for (int begin = waves.least; begin + waves.least <= waves.steps; ++begin) {
      WaveSplit split{tiles, helpers, begin, waves.steps};
      if (helpers == 1) {
        consider(split);
      } else if (helper_is_shared(split)) {
        const int apart = 1 + waves.steps / 512;  // so that long K does not take long
        for (int i = begin + 1; i < waves.steps; i += apart) {
          split.middle = i;
          consider(split);
        }
      } else {
        split.middle = begin + (waves.steps - begin) / helpers;
        consider(split);
      }
    }
  }
  return best;
}

/// How many of `rows` of tiles are one raster group, taken column by column: at most `most` where
/// halving leads there.
constexpr int swept_rows(int rows, int most) {
  while (rows > most && rows % 2 == 0) rows /= 2;
  return rows;
}

/// What a cluster does of a tile at a time.
struct TileSteps {
  int begin = 0, end = 0;       ///< steps along K; none: there is no such work
  bool writes_partial = false;  ///< a helper's: the accumulators go to slot `partial`
  int reads_partials = 0;       ///< adds helpers' partials, in slots from `partial` on
  int partial = 0;              ///< below partial_slots()
};

struct TileWork {
  int at = 0;  ///< which tile
  TileSteps steps;
};

/// Of the last wave's tiles before number `tile`.
constexpr int slots_before(const WaveSplit& split, int tile) {
  return tile / split.tiles * pieces_before(split, split.tiles) +
         pieces_before(split, tile % split.tiles);
}

constexpr int partial_slots(const Waves& waves, const WaveSplit& split) {
  return split.tiles == 0 ? 0 : slots_before(split, waves.rest);
}

/// Number `index` of the pieces that helper number `helper` of all does; none behind the last one.
constexpr TileWork help_of(const Waves& waves, const WaveSplit& split, int helper, int index) {
  const int first = helper / split.helpers * split.tiles;  // of the group's tiles
  for (int t = 0; t < split.tiles && first + t < waves.rest; ++t) {
    for (int i = 0; i < pieces_of(split, t); ++i) {
      const SplitPiece piece = piece_of(split, waves.steps, t, i);
      if (piece.helper != helper % split.helpers || index-- > 0) continue;
      return {waves.tiles - waves.rest + first + t,
              {piece.begin, piece.end, true, 0, slots_before(split, first + t) + i}};
    }
  }
  return {};
}

/// Number `index` of `cluster`'s works.
constexpr TileWork work_of(const Waves& waves, const WaveSplit& split, int cluster, int index) {
  const int rest = split.tiles == 0 ? 0 : waves.rest, whole = waves.tiles - rest;
  const auto tile = [&](int number) -> TileWork {
    const int at = cluster + number * waves.clusters;
    return at < whole ? TileWork{at, {0, waves.steps}} : TileWork{};
  };
  if (rest == 0) return tile(index);
  const int mine = whole / waves.clusters;  // tiles of its own, of every cluster
  if (cluster < rest) {
    if (index != mine) return tile(index);
    return {whole + cluster,
            {0, split.begin, false, pieces_of(split, cluster % split.tiles),
             slots_before(split, cluster)}};
  }
  const int first = waves.before ? mine - 1 : mine;  // of its pieces
  if (index < first) return tile(index);
  int pieces = 0;
  while (help_of(waves, split, cluster - rest, pieces).steps.end != 0) ++pieces;
  if (index < first + pieces) return help_of(waves, split, cluster - rest, index - first);
  return tile(index - pieces);
}

}  // namespace tandem::schedule
