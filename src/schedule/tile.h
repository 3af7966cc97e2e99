// One output tile by its coordinates, in units of tiles.
#pragma once

namespace tandem::schedule {

struct Tile {
  int row, column;
  constexpr bool operator==(const Tile&) const = default;
};

}  // namespace tandem::schedule
