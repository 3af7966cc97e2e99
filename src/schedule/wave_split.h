// Distribution of a GEMM's tiles over persistent clusters, round-robin, a wave at a time, with the
// last wave split along K if it would leave clusters idle: the cluster of a tile computes the
// beginning, adds what remains to be added and stores the tile; helpers compute the rest, one K
// slice at a time, and store split-K partials, which the tile's cluster adds. Tiles and helpers
// form small groups, up to ten tiles per helper or three helpers per tile. So there are a few
// fronts along K, and clusters still read the same operands at the same time: with equal runs of
// steps that begin anywhere, as in stream-K, they did not, and that cost more than it gained.
//
// If possible, helpers compute their slices before the last of their own tiles, so that no cluster
// waits.
//
// Pure functions, for the host, which passes kernels their work items, and the tests. Free of
// cycles: a split tile waits for helpers, which wait for no helper.
#pragma once

namespace tandem::schedule {

/// Split of the last wave into groups of `tiles` that share `helpers`; none if tiles is 0. With two
/// helpers or more, `helpers` differs from `tiles` by one, or there is one tile.
struct WaveSplit {
  int tiles = 0, helpers = 1;
  int begin = 0;   ///< first K steps of a tile, computed by its own cluster
  int middle = 0;  ///< begin of the second slice of a tile, if it has two or more
};

/// Tiles and the clusters that compute them.
struct Waves {
  int tiles = 1, clusters = 1;
  int steps = 1;    ///< K steps per tile
  int added = 0;    ///< steps of a tile of the last wave that add received rows
  int minimum = 1;  ///< min K steps of a cluster at a time
  int rest = 0;     ///< tiles of the last wave, if that may be split
  /// Helpers compute their slices before their tile of the previous wave, which must exist.
  bool before = false;
};

/// K slice of a tile of a group, and the helper in the group that computes it.
struct TileSlice {
  int tile = 0, helper = 0;
  int begin = 0, end = 0;
};

/// Whether each of the group's tiles has a helper of its own and one that all of them share.
/// Otherwise one tile is shared by all helpers, and each other tile has its own.
constexpr bool helper_is_shared(const WaveSplit& split) {
  return split.tiles > 1 && split.tiles < split.helpers;
}

/// Number of slices of the group's tile `tile`.
constexpr int num_slices(const WaveSplit& split, int tile) {
  if (helper_is_shared(split)) return 2;
  return split.helpers > 1 && tile + 1 == split.tiles ? split.helpers : 1;
}

/// Number of slices of the group's tiles before `tile`.
constexpr int slices_before(const WaveSplit& split, int tile) {
  int slices = 0;
  for (int t = 0; t < tile; ++t) slices += num_slices(split, t);
  return slices;
}

/// Slice `slice` of the group's tile `tile`.
constexpr TileSlice slice_of(const WaveSplit& split, int steps, int tile, int slice) {
  const int slices = num_slices(split, tile), rest = steps - split.middle;
  // All but the first are equal.
  const auto bound = [&](int number) {
    return number == 0 ? split.begin : split.middle + (number - 1) * rest / (slices - 1);
  };
  const int end = slice + 1 == slices ? steps : bound(slice + 1);
  int helper = split.helpers > 1 ? tile : 0;
  if (slices > 1 && !helper_is_shared(split)) helper = slice;
  if (slice == 1 && helper_is_shared(split)) helper = split.helpers - 1;
  return {tile, helper, bound(slice), end};
}

/// Split of the last wave with the earliest end, if it gains enough. Costs are in tenths of a K
/// step, as measured with bf16: adding 64 received rows, storing a partial, the delay until it is
/// visible, adding it, the min gain of a split. With e4m3 a step takes half as long.
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
        const int slices = num_slices(split, tile);
        reads_partials = slices > reads_partials ? slices : reads_partials;
        for (int i = 0; i < slices; ++i) {
          const TileSlice slice = slice_of(split, waves.steps, tile, i);
          if (slice.end - slice.begin < waves.minimum) return;
          if (slice.helper == helper) busy += (slice.end - slice.begin) * kStep + kWritePartial;
        }
      }
      helped = busy > helped ? busy : helped;
    }
    // Rows would be added in an unsplit wave, too.
    const int done = split.begin * kStep + waves.added * kAddRows,
              sum_time = reads_partials * kAddPartial;
    const int waited = waves.before ? 0 : helped + kSeen;
    const int finished = (waited > done ? waited : done) + sum_time;
    const int end = (finished > helped ? finished : helped) - waves.added * kAddRows;
    if (end >= soonest) return;
    soonest = end;
    best = split;
  };
  if (waves.rest == 0) return best;
  for (const auto& [tiles, helpers] : kGroups) {
    const int groups = (waves.rest + tiles - 1) / tiles;
    if (waves.rest + groups * helpers > waves.clusters) continue;
    for (int begin = waves.minimum; begin + waves.minimum <= waves.steps; ++begin) {
      WaveSplit split{tiles, helpers, begin, waves.steps};
      if (helpers == 1) {
        consider(split);
      } else if (helper_is_shared(split)) {
        const int apart = 1 + waves.steps / 512;  // bounds the search time for long K
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

/// Rows of tiles of one raster group, taken column by column: `rows` halved while even and above
/// `maximum`.
constexpr int swept_rows(int rows, int maximum) {
  while (rows > maximum && rows % 2 == 0) rows /= 2;
  return rows;
}

/// Work of a cluster on a tile at a time.
struct TileSteps {
  int begin = 0, end = 0;       ///< K steps; none: no such work item
  bool writes_partial = false;  ///< helper: stores the accumulators to slot `partial`
  int reads_partials = 0;       ///< number of helpers' partials to add, in slots from `partial` on
  int partial = 0;              ///< below partial_slots()
};

struct TileWork {
  int at = 0;  ///< index of the tile
  TileSteps steps;
};

/// Number of slots of the last wave's tiles before `tile`.
constexpr int slots_before(const WaveSplit& split, int tile) {
  return tile / split.tiles * slices_before(split, split.tiles) +
         slices_before(split, tile % split.tiles);
}

constexpr int partial_slots(const Waves& waves, const WaveSplit& split) {
  return split.tiles == 0 ? 0 : slots_before(split, waves.rest);
}

/// Slice `index` of those that helper `helper` of all computes; none past the last.
constexpr TileWork help_of(const Waves& waves, const WaveSplit& split, int helper, int index) {
  const int first = helper / split.helpers * split.tiles;  // first tile of the group
  for (int t = 0; t < split.tiles && first + t < waves.rest; ++t) {
    for (int i = 0; i < num_slices(split, t); ++i) {
      const TileSlice slice = slice_of(split, waves.steps, t, i);
      if (slice.helper != helper % split.helpers || index-- > 0) continue;
      return {waves.tiles - waves.rest + first + t,
              {slice.begin, slice.end, true, 0, slots_before(split, first + t) + i}};
    }
  }
  return {};
}

/// Work item `index` of `cluster`.
constexpr TileWork work_of(const Waves& waves, const WaveSplit& split, int cluster, int index) {
  const int rest = split.tiles == 0 ? 0 : waves.rest, whole = waves.tiles - rest;
  const auto tile = [&](int number) -> TileWork {
    const int at = cluster + number * waves.clusters;
    return at < whole ? TileWork{at, {0, waves.steps}} : TileWork{};
  };
  if (rest == 0) return tile(index);
  const int local = whole / waves.clusters;  // whole tiles of every cluster
  if (cluster < rest) {
    if (index != local) return tile(index);
    return {whole + cluster,
            {0, split.begin, false, num_slices(split, cluster % split.tiles),
             slots_before(split, cluster)}};
  }
  const int first = waves.before ? local - 1 : local;  // index of its first slice
  if (index < first) return tile(index);
  int slices = 0;
  while (help_of(waves, split, cluster - rest, slices).steps.end != 0) ++slices;
  if (index < first + slices) return help_of(waves, split, cluster - rest, index - first);
  return tile(index - slices);
}

}  // namespace tandem::schedule
