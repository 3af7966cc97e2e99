// Output tile by its coordinates, in units of tiles.
#pragma once

namespace tandem::schedule {

struct Tile {
  int row, column;
  constexpr bool operator==(const Tile&) const = default;
};

/// Max rows of x of a raster group, if possible: with the columns multiplied at the same time, the
/// working set about fits H200's 50 MB of L2 (in bf16, at K 8192, these rows are 34 MB).
constexpr int kSweptRows = 2048;

}  // namespace tandem::schedule
