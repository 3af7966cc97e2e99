#include "kernels/dct.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/float_operand.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cuda/kernels.h"
#include "tandem/error.h"

namespace tandem {
namespace {

int largest_divisor(int64_t size, int maximum) {
  int64_t divisor = std::min<int64_t>(size, maximum);
  while (size % divisor != 0) --divisor;
  return int(divisor);
}

}  // namespace

DctTiles DctTiles::of(int64_t rows, int64_t columns, int side) {
  if (rows < 1 || columns < 1) {
    throw InvalidArgument(
        fmt::format("dct: matrix {} x {}: expected sizes of at least 1", rows, columns));
  }
  if (side < 1 || side > kMaxDctTile) {
    throw InvalidArgument(fmt::format("dct: tile {}: expected 1 to {}", side, kMaxDctTile));
  }
  return {rows, columns, largest_divisor(rows, side), largest_divisor(columns, side)};
}

void dct_forward(const Exec& exec, const DctTiles& tiles, float scale, const Tensor& x,
                 const Tensor& coefficients) {
  require_floats(exec, "dct_forward", "x", x, tiles.rows * tiles.columns);
  require_floats(exec, "dct_forward", "coefficients", coefficients, tiles.rows * tiles.columns);
  if (exec.on_gpu()) return gpu::dct_forward(exec.stream, tiles, scale, x, coefficients);
  cpu::dct_forward(tiles, scale, x, coefficients);
}

void dct_inverse(const Exec& exec, const DctTiles& tiles, const Tensor& coefficients,
                 const Tensor& x) {
  require_floats(exec, "dct_inverse", "coefficients", coefficients, tiles.rows * tiles.columns);
  require_floats(exec, "dct_inverse", "x", x, tiles.rows * tiles.columns);
  if (exec.on_gpu()) return gpu::dct_inverse(exec.stream, tiles, coefficients, x);
  cpu::dct_inverse(tiles, coefficients, x);
}

void to_tiles(const Exec& exec, const DctTiles& tiles, const Tensor& x, const Tensor& packed) {
  require_floats(exec, "to_tiles", "x", x, tiles.rows * tiles.columns);
  require_floats(exec, "to_tiles", "packed", packed, tiles.rows * tiles.columns);
  if (exec.on_gpu()) return gpu::to_tiles(exec.stream, tiles, x, packed);
  cpu::to_tiles(tiles, x, packed);
}

void from_tiles(const Exec& exec, const DctTiles& tiles, const Tensor& packed, const Tensor& x) {
  require_floats(exec, "from_tiles", "packed", packed, tiles.rows * tiles.columns);
  require_floats(exec, "from_tiles", "x", x, tiles.rows * tiles.columns);
  if (exec.on_gpu()) return gpu::from_tiles(exec.stream, tiles, packed, x);
  cpu::from_tiles(tiles, packed, x);
}

}  // namespace tandem
