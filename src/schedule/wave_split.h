// How persistent clusters take the tiles of a matrix product in turn, a wave at a time, and how the
// last wave is split along K where it would leave clusters idle: the cluster that has a tile does
// the beginning, adds what is left to add and stores it; a helper does the end and leaves its sums
// in memory, for the first one to add. A helper serves up to four tiles, or a tile has up to three
// helpers. So there are a few fronts along K, and clusters still read the same operands at the same
// time: with equal runs of steps that begin anywhere, as in stream-K, they did not, and that cost
// more than it gained.
//
// Pure functions, for the host, which hands kernels their works, and the tests. Never circular: a
// split tile waits for helpers, which wait for no helper.
#pragma once

namespace tandem::schedule {

/// None where served is 0.
struct WaveSplit {
  int served = 0;   ///< tiles by one helper
  int helpers = 1;  ///< of one tile; one of the two is 1
  int begin = 0;    ///< steps along K of a tile that no helper does
};

/// Tiles and the clusters that take them.
struct Waves {
  int tiles = 1, clusters = 1;
  int steps = 1;  ///< of a tile along K
  int added = 0;  ///< steps of a tile of the last wave that add something else
  int least = 1;  ///< steps along K that a cluster does at least at a time
  int rest = 0;   ///< tiles of the last wave, if that may be split
};

/// The split of the last wave that ends soonest, if it gains anything worth it. Times are in tenths
/// of a step along K, as measured: a helper's writing, the time until it is seen, adding.
constexpr WaveSplit best_split(const Waves& waves) {
  constexpr int kStep = 10, kPart = 7, kLend = 70, kSeen = 30, kBorrow = 40, kWorth = 40;
  constexpr int kMostServed = 4, kMostHelpers = 3;
  int soonest = waves.steps * kStep - kWorth;
  WaveSplit best;
  const auto consider = [&](int served, int helpers) {
    if (waves.rest + (waves.rest * helpers + served - 1) / served > waves.clusters) return;
    for (int begin = waves.least; begin + helpers * waves.least <= waves.steps; ++begin) {
      const int piece = (waves.steps - begin + helpers - 1) / helpers;
      const int helped = served * (piece * kStep + kLend) + kSeen;
      const int done = begin * kStep + waves.added * kPart;
      const int end = (helped > done ? helped : done) + helpers * kBorrow - waves.added * kPart;
      if (end >= soonest) continue;
      soonest = end;
      best = {served, helpers, begin};
    }
  };
  if (waves.rest == 0) return best;
  for (int served = 1; served <= kMostServed; ++served) consider(served, 1);
  for (int helpers = 2; helpers <= kMostHelpers; ++helpers) consider(1, helpers);
  return best;
}

/// How many of `rows` of tiles are swept together, column by column: at most `most` where halving
/// leads there.
constexpr int swept_rows(int rows, int most) {
  while (rows > most && rows % 2 == 0) rows /= 2;
  return rows;
}

/// What a cluster does of a tile at a time.
struct TileSteps {
  int begin = 0, end = 0;  ///< steps along K; none: there is no such work
  bool lends = false;      ///< a helper's: the sums go to place `lent`
  int borrows = 0;         ///< adds the sums that helpers left, in places from `lent` on
  int lent = 0;            ///< below lent_places()
};

struct TileWork {
  int at = 0;  ///< which tile
  TileSteps steps;
};

constexpr int lent_places(const Waves& waves, const WaveSplit& split) {
  return split.served == 0 ? 0 : waves.rest * split.helpers;
}

/// Number `index` of `cluster`'s works.
constexpr TileWork work_of(const Waves& waves, const WaveSplit& split, int cluster, int index) {
  const int rest = split.served == 0 ? 0 : waves.rest, whole = waves.tiles - rest;
  const int at = cluster + index * waves.clusters;
  if (at < whole) return {at, {0, waves.steps}};
  if (rest == 0) return {};
  const int number = index - whole / waves.clusters;  // of the last wave's
  if (cluster < rest) {
    if (number > 0) return {};
    return {whole + cluster, {0, split.begin, false, split.helpers, cluster * split.helpers}};
  }
  const int helper = cluster - rest, part = helper % split.helpers;
  const int tile = helper / split.helpers * split.served + number;
  if (number >= split.served || tile >= rest) return {};
  const int steps = waves.steps - split.begin;
  return {whole + tile,
          {split.begin + part * steps / split.helpers,
           split.begin + (part + 1) * steps / split.helpers, true, 0, tile * split.helpers + part}};
}

}  // namespace tandem::schedule
