// bf16 GEMM on tile registers: AMX, or their emulation in tests. Every element is summed in steps
// of 32 k, in order, whatever the shape, the layout and the number of threads, so that a row has
// the same bits with any others. oneDNN cuts K so that blocks of its rows and columns fit into the
// L2 cache, and adds the sums of the parts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "core/cpu/parallel.h"
#include "gemm/gemm.h"
#include "gemm/packed_bytes.h"

// Vectors are passed within this build only.
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace tandem::cpu::tile {

constexpr int64_t kSide = 16;    // rows and columns of a tile of sums
constexpr int64_t kStep = 32;    // k of a tile of an operand
constexpr int64_t kDepth = 512;  // k between loads and stores of sums: column panels stay in L1
constexpr int64_t kBlock = 16;   // tiles along a side of a thread's block of sums, which is in L2

constexpr int64_t kTogether = 4;  // panels packed at a time: whole lines of the cache of each k

/// Two values of adjacent k.
using Pair = uint32_t;

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

/// `count` vectors of `k` values, each strided by `vector` and `value`, one of which is 1.
struct Operand {
  const BFloat16* data;
  int64_t count, k, vector, value;
  int64_t tiles() const { return (count + kSide - 1) / kSide; }
  int64_t steps() const { return (k + kStep - 1) / kStep; }
  int64_t panel_pairs() const { return steps() * kStep / 2 * kSide; }
};

/// to[p * 16 + j] = from[j * row + p], for j and p below 16; `row` in bytes.
inline void transpose(const void* from, int64_t row, Pair* to) {
  using Row = Pair __attribute__((vector_size(64)));
  Row x[kSide], y[kSide];
  for (int64_t j = 0; j < kSide; ++j) {
    std::memcpy(&x[j], static_cast<const char*>(from) + j * row, sizeof(Row));
  }
  for (int round = 0; round < 4; ++round) {  // each rotates the 8 bits of an element's index
    for (int i = 0; i < 8; ++i) {
      y[2 * i] = __builtin_shufflevector(x[i], x[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                         6, 22, 7, 23);
      y[2 * i + 1] = __builtin_shufflevector(x[i], x[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                             13, 29, 14, 30, 15, 31);
    }
    std::copy_n(y, kSide, x);
  }
  std::memcpy(to, x, sizeof x);
}

/// Packs tile `tile` of vectors as [k / 2][16] pairs from pair `pair` on; what is beyond the
/// operand is 0.
inline void pack_rest(const Operand& o, int64_t tile, int64_t pair, Pair* to) {
  const BFloat16* from = o.data + tile * kSide * o.vector;
  const int64_t vectors = std::min(kSide, o.count - tile * kSide);
  std::fill(to + pair * kSide, to + o.panel_pairs(), 0);
  for (int64_t j = 0; j < vectors; ++j) {
    const BFloat16* const vector = from + j * o.vector;
    for (int64_t p = pair; 2 * p < o.k; ++p) {
      const Pair odd = 2 * p + 1 < o.k ? vector[(2 * p + 1) * o.value].bits : 0;
      to[p * kSide + j] = vector[2 * p * o.value].bits | odd << 16;
    }
  }
}

/// Packs `tiles`, one panel after the other.
inline void pack_panels(const Operand& o, Range tiles, Pair* to) {
  using Half = uint16_t __attribute__((vector_size(32)));
  using Whole = Pair __attribute__((vector_size(64)));
  const int64_t panel = o.panel_pairs(), whole = std::min(tiles.end, o.count / kSide);
  for (int64_t first = tiles.begin; first < tiles.end; first += kTogether) {
    const int64_t end = std::min(first + kTogether, whole);
    const int64_t pairs = o.value == 1 ? o.k / kStep * (kStep / 2) : o.k / 2;
    Pair* const panels = to + (first - tiles.begin) * panel;
    if (o.value == 1) {
      for (int64_t tile = first; tile < end; ++tile) {
        const BFloat16* const from = o.data + tile * kSide * o.vector;
        for (int64_t pair = 0; pair < pairs; pair += kStep / 2) {
          transpose(from + 2 * pair, o.vector * int64_t(sizeof(BFloat16)),
                    panels + (tile - first) * panel + pair * kSide);
        }
      }
    } else {
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const BFloat16* from = o.data + first * kSide + 2 * pair * o.value;
        for (int64_t tile = first; tile < end; ++tile, from += kSide) {
          Half even, odd;
          std::memcpy(&even, from, sizeof even);
          std::memcpy(&odd, from + o.value, sizeof odd);
          const Whole both =
              __builtin_convertvector(even, Whole) | __builtin_convertvector(odd, Whole) << 16;
          std::memcpy(panels + (tile - first) * panel + pair * kSide, &both, sizeof both);
        }
      }
    }
    for (int64_t tile = first; tile < std::min(first + kTogether, tiles.end); ++tile) {
      pack_rest(o, tile, tile < whole ? pairs : 0, panels + (tile - first) * panel);
    }
  }
}

/// Copies `tiles` as [16][k rounded up to 32] each.
inline void copy_vectors(const Operand& o, Range tiles, BFloat16* to) {
  const int64_t k = o.steps() * kStep, panel = o.panel_pairs();
  const auto panels = std::make_unique_for_overwrite<Pair[]>(size_t(kTogether * panel));
  for (int64_t first = tiles.begin; first < tiles.end; first += kTogether) {
    const int64_t count = std::min(kTogether, tiles.end - first);
    pack_panels(o, {first, first + count}, panels.get());
    for (int64_t tile = 0; tile < count; ++tile, to += kSide * k) {
      for (int64_t step = 0; step < o.steps(); ++step) {
        Pair turned[kSide * kSide];
        transpose(panels.get() + tile * panel + step * kStep / 2 * kSide, kSide * sizeof(Pair),
                  turned);
        for (int64_t j = 0; j < kSide; ++j) {
          std::memcpy(static_cast<void*>(to + j * k + step * kStep), turned + j * kSide,
                      kStep * sizeof(BFloat16));
        }
      }
    }
  }
}

/// Vectors of which tiles load 16 at a time: in place, but for those that are copied.
struct Rows {
  const BFloat16* data;
  int64_t stride;
  int64_t first_copied;  ///< tile
  const BFloat16* copies;
  int64_t copy_stride;
  struct Tile {
    const BFloat16* data;
    int64_t stride;
  };
  Tile at(int64_t tile) const {
    if (tile < first_copied) return {data + tile * kSide * stride, stride};
    return {copies + (tile - first_copied) * kSide * copy_stride, copy_stride};
  }
};

/// Sums of kRows x kColumns tiles over `steps` steps; `sums` are [tile row][tile column][16][16].
template <class Tiles, int kRows, int kColumns>
void add_tiles(const Rows::Tile* rows, const Pair* const* columns, int64_t steps, bool first,
               float* sums, int64_t sums_row) {
  constexpr int kA = 4, kB = 6, kNext = kColumns == 2 ? 1 : 0, kBelow = kRows == 2 ? 2 : 0;
  const BFloat16 *a = rows[0].data, *a_below = rows[kRows - 1].data;
  const int64_t stride = rows[0].stride * 2, stride_below = rows[kRows - 1].stride * 2;
  const Pair *b = columns[0], *b_next = columns[kColumns - 1];
  const auto each_sum = [&](const auto& visit) {
    visit.template operator()<0>(sums);
    if constexpr (kColumns == 2) visit.template operator()<1>(sums + kSide * kSide);
    if constexpr (kRows == 2) visit.template operator()<2>(sums + sums_row);
    if constexpr (kRows == 2 && kColumns == 2) {
      visit.template operator()<3>(sums + sums_row + kSide * kSide);
    }
  };
  each_sum([&]<int kSum>(float* at) {
    if (first) {
      Tiles::template zero<kSum>();
    } else {
      Tiles::template load<kSum>(at, 64);
    }
  });
  for (int64_t step = 0; step < steps; ++step) {
    Tiles::template load<kA>(a, stride);
    Tiles::template load<kB>(b, 64);
    Tiles::template multiply<0, kA, kB>();
    if constexpr (kColumns == 2) {
      Tiles::template load<kB + 1>(b_next, 64);
      Tiles::template multiply<kNext, kA, kB + 1>();
    }
    if constexpr (kRows == 2) {
      Tiles::template load<kA + 1>(a_below, stride_below);
      Tiles::template multiply<kBelow, kA + 1, kB>();
    }
    if constexpr (kRows == 2 && kColumns == 2) {
      Tiles::template multiply<kBelow + kNext, kA + 1, kB + 1>();
    }
    a += kStep, a_below += kStep;
    b += kStep / 2 * kSide, b_next += kStep / 2 * kSide;
  }
  each_sum([&]<int kSum>(float* at) { Tiles::template store<kSum>(at); });
}

/// Sums of a block of tiles; `sums` are [tile row][tile column][16][16].
template <class Tiles>
void sum_block(const Rows& rows, Range down, const Pair* panels, int64_t panel_pairs, Range across,
               int64_t steps, float* sums) {
  const int64_t sums_row = across.size() * kSide * kSide;
  for (int64_t step = 0; step < steps; step += kDepth / kStep) {
    const int64_t count = std::min(kDepth / kStep, steps - step);
    for (int64_t column = across.begin; column < across.end; column += 2) {
      const Pair* const at = panels + column * panel_pairs + step * kStep / 2 * kSide;
      const Pair* const columns[] = {at, at + panel_pairs};
      const bool two_columns = column + 1 < across.end;
      for (int64_t row = down.begin; row < down.end; row += 2) {
        const bool two_rows = row + 1 < down.end;
        Rows::Tile tiles[] = {rows.at(row), rows.at(two_rows ? row + 1 : row)};
        for (Rows::Tile& tile : tiles) tile.data += step * kStep;
        float* const to =
            sums + (row - down.begin) * sums_row + (column - across.begin) * kSide * kSide;
        const auto add = two_rows ? (two_columns ? add_tiles<Tiles, 2, 2> : add_tiles<Tiles, 2, 1>)
                                  : (two_columns ? add_tiles<Tiles, 1, 2> : add_tiles<Tiles, 1, 1>);
        add(tiles, columns, count, step == 0, to, sums_row);
      }
    }
  }
}

/// out = sums + bias + old value, in this order, of the rows and columns of out in one tile.
inline void write_tile(const float* sums, int64_t row, int64_t column, const Tensor& out,
                       const GemmOptions& options) {
  const int64_t n = out.dim(1), columns = std::min(kSide, n - column);
  const auto write = [&]<typename T>(T* to, const T* bias) {
    const auto widen = [](T value) {
      if constexpr (std::is_same_v<T, float>)
        return value;
      else
        return value.to_float();
    };
    for (int64_t i = 0; i < std::min(kSide, out.dim(0) - row); ++i, to += n, sums += kSide) {
      for (int64_t j = 0; j < columns; ++j) {
        float sum = sums[j];
        if (bias) sum += widen(bias[j]);
        if (options.accumulate) sum += widen(to[j]);
        if constexpr (std::is_same_v<T, float>)
          to[j] = sum;
        else
          to[j] = BFloat16::from_float(sum);
      }
    }
  };
  const auto of = [&]<typename T>(T) {
    write(out.as<T>() + row * n + column, options.bias ? options.bias->as<T>() + column : nullptr);
  };
  out.dtype() == DType::f32 ? of(float()) : of(BFloat16());
}

/// Operands of a product. Rows are read in place if their k are adjacent, but for the last ones;
/// columns are packed: those of the smaller operand, if any.
struct Packing {
  Packing(const Tensor& a, const Tensor& b) {
    const int64_t m = a.dim(0), k = a.dim(1), n = b.dim(1);
    const Operand left{a.as<BFloat16>(), m, k, a.stride(0), a.stride(1)};
    const Operand right{b.as<BFloat16>(), n, k, b.stride(1), b.stride(0)};
    const bool left_fits = left.value == 1, right_fits = right.value == 1;
    turned = right_fits && (!left_fits || n >= m);
    vertical = turned ? right : left;
    horizontal = turned ? left : right;
    const bool in_place = vertical.value == 1 && k % kStep == 0;
    first_copied = in_place ? vertical.count / kSide : 0;
  }
  int64_t copied() const { return vertical.tiles() - first_copied; }
  PackedBytes bytes() const {
    const int64_t panel = horizontal.panel_pairs() * int64_t(sizeof(Pair));
    return {horizontal.tiles() * panel, copied() * panel};
  }

  bool turned = false;  ///< whether out is computed by columns
  Operand vertical{}, horizontal{};
  int64_t first_copied = 0;  ///< tile of `vertical`
};

/// Arguments as for `gemm`: a and b in bf16, none empty, without gaps, out row-major.
template <class Tiles>
void gemm(const Tensor& a, const Tensor& b, const Tensor& out, const GemmOptions& options) {
  const Packing packing(a, b);
  const auto& [turned, vertical, horizontal, first_copied] = packing;
  const int64_t k = a.dim(1), copied = packing.copied();
  const PackedBytes packed = packing.bytes();

  thread_local Memory panel_memory, copy_memory;
  const auto reserve = [](Memory& memory, int64_t bytes) {
    if (int64_t(memory.bytes()) < bytes) memory = Memory(size_t(bytes));
    return memory.data();
  };
  const int64_t panel_pairs = horizontal.panel_pairs(), steps = horizontal.steps();
  auto* const panels = reinterpret_cast<Pair*>(reserve(panel_memory, packed.columns));
  auto* const copies = reinterpret_cast<BFloat16*>(reserve(copy_memory, packed.rows));
  const int64_t min_panels = std::max<int64_t>(1, (1 << 15) / panel_pairs);
  parallel_ranges(horizontal.tiles(), min_panels, [&](int64_t begin, int64_t end) {
    pack_panels(horizontal, {begin, end}, panels + begin * panel_pairs);
  });
  parallel_ranges(copied, min_panels, [&](int64_t begin, int64_t end) {
    copy_vectors(vertical, {first_copied + begin, first_copied + end},
                 copies + begin * panel_pairs * 2);
  });

  const Rows rows{vertical.data, vertical.vector, first_copied, copies, steps * kStep};
  const int64_t across = std::min(kBlock, horizontal.tiles());
  const int64_t num_across = (horizontal.tiles() + across - 1) / across;
  int64_t down = std::min(kBlock, vertical.tiles());
  const auto blocks = [&] { return (vertical.tiles() + down - 1) / down * num_across; };
  while (down > 2 && blocks() < 2 * omp_get_max_threads()) down = (down + 1) / 2;
  constexpr int64_t kMinWork = 1 << 20;  // min multiplications that are worth another thread
  const int64_t work = down * across * kSide * kSide * k;
  parallel_ranges(blocks(), (kMinWork + work - 1) / work, [&](int64_t begin, int64_t end) {
    thread_local const auto sums = std::make_unique<float[]>(kBlock * kBlock * kSide * kSide);
    Tiles::begin();
    for (int64_t block = begin; block < end; ++block) {
      const int64_t top = block / num_across * down, first = block % num_across * across;
      const Range vertically{top, std::min(vertical.tiles(), top + down)};
      const Range horizontally{first, std::min(horizontal.tiles(), first + across)};
      sum_block<Tiles>(rows, vertically, panels, panel_pairs, horizontally, steps, sums.get());
      const float* tile = sums.get();
      for (int64_t i = vertically.begin; i < vertically.end; ++i) {
        for (int64_t j = horizontally.begin; j < horizontally.end; ++j, tile += kSide * kSide) {
          float upright[kSide * kSide];
          if (turned) transpose(tile, 64, reinterpret_cast<Pair*>(upright));
          write_tile(turned ? upright : tile, (turned ? j : i) * kSide, (turned ? i : j) * kSide,
                     out, options);
        }
      }
    }
    Tiles::end();
  });
}

}  // namespace tandem::cpu::tile
