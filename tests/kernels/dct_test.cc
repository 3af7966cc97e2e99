// Cosine transforms by tiles against their definition, one coefficient at a time in f64.
#include "kernels/dct.h"

#include <gmock/gmock.h>

#include <cmath>
#include <numbers>
#include <vector>

#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

const Exec kHost;

std::vector<float> random_values(int64_t count, uint64_t stream) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[size_t(i)] = uniform(5, stream, uint64_t(i)) - 0.5f;
  return values;
}

Tensor tensor_of(std::vector<float>& values) {
  return Tensor::of(std::span(values), {int64_t(values.size())});
}

double cosine(int k, int n, int size) {
  return std::sqrt((k ? 2.0 : 1.0) / size) *
         std::cos(std::numbers::pi * k * (2 * n + 1) / (2.0 * size));
}

/// Coefficient (k, l) of a tile whose first element is x[first].
double coefficient(const DctTiles& tiles, const std::vector<float>& x, int64_t first, int k,
                   int l) {
  double sum = 0;
  for (int r = 0; r < tiles.height; ++r) {
    for (int c = 0; c < tiles.width; ++c) {
      sum += double(x[size_t(first + r * tiles.columns + c)]) * cosine(k, r, tiles.height) *
             cosine(l, c, tiles.width);
    }
  }
  return sum;
}

struct Shape {
  int64_t rows, columns;
  int side;
};
const Shape kShapes[] = {{1, 1, 64},   {1, 64, 64},   {1, 200, 64}, {200, 1, 64}, {6, 10, 4},
                         {7, 13, 64},  {67, 71, 64},  {48, 96, 48}, {34, 51, 20}, {128, 64, 64},
                         {63, 33, 64}, {65, 130, 64}, {3, 4, 1}};

TEST(Dct, TilesAreTheLargestThatDivide) {
  const auto sides = [](int64_t rows, int64_t columns, int side) {
    const DctTiles tiles = DctTiles::of(rows, columns, side);
    EXPECT_EQ(tiles.tiles() * tiles.elements(), rows * columns);
    return std::pair(tiles.height, tiles.width);
  };
  EXPECT_EQ(sides(4096, 1024, 64), std::pair(64, 64));
  EXPECT_EQ(sides(1, 768, 64), std::pair(1, 64));
  EXPECT_EQ(sides(50257, 96, 64), std::pair(29, 48));
  EXPECT_EQ(sides(67, 30, 64), std::pair(1, 30));
  EXPECT_EQ(sides(100, 100, 64), std::pair(50, 50));
}

TEST(Dct, TilesAreCopiedToWhereTheirCoefficientsAre) {
  for (const auto& [rows, columns, side] : kShapes) {
    const DctTiles tiles = DctTiles::of(rows, columns, side);
    std::vector<float> x = random_values(rows * columns, 1), packed(x.size()), back(x.size());
    to_tiles(kHost, tiles, tensor_of(x), tensor_of(packed));
    size_t next = 0;
    for (int64_t top = 0; top < rows; top += tiles.height) {
      for (int64_t left = 0; left < columns; left += tiles.width) {
        for (int i = 0; i < tiles.elements(); ++i) {
          const int64_t at = (top + i / tiles.width) * columns + left + i % tiles.width;
          ASSERT_EQ(packed[next++], x[size_t(at)]) << rows << " x " << columns << " " << i;
        }
      }
    }
    from_tiles(kHost, tiles, tensor_of(packed), tensor_of(back));
    EXPECT_EQ(back, x);
  }
}

TEST(Dct, CoefficientsAreThoseOfTheDefinition) {
  for (const auto& [rows, columns, side] : kShapes) {
    const DctTiles tiles = DctTiles::of(rows, columns, side);
    std::vector<float> x = random_values(rows * columns, 1), found(x.size());
    dct_forward(kHost, tiles, 0.5f, tensor_of(x), tensor_of(found));
    const int64_t across = columns / tiles.width;
    // Some coefficients of each of some tiles: the definition takes a tile's elements for each.
    for (int64_t tile = 0; tile < tiles.tiles(); tile += 1 + tiles.tiles() / 5) {
      const int64_t first = tile / across * tiles.height * columns + tile % across * tiles.width;
      for (int i = 0; i < tiles.elements(); i += 1 + tiles.elements() / 97) {
        const double expected =
            0.5 * coefficient(tiles, x, first, i / tiles.width, i % tiles.width);
        ASSERT_NEAR(double(found[size_t(tile * tiles.elements() + i)]), expected, 2e-6)
            << rows << " x " << columns << ", tile " << tile << ", coefficient " << i;
      }
    }
  }
}

TEST(Dct, InverseReturnsTheValues) {
  for (const auto& [rows, columns, side] : kShapes) {
    const DctTiles tiles = DctTiles::of(rows, columns, side);
    std::vector<float> x = random_values(rows * columns, 2), middle(x.size()), back(x.size(), NAN);
    dct_forward(kHost, tiles, 1, tensor_of(x), tensor_of(middle));
    dct_inverse(kHost, tiles, tensor_of(middle), tensor_of(back));
    double squares = 0, expected = 0, changed = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_NEAR(back[i], x[i], 1e-6) << rows << " x " << columns << ", element " << i;
      squares += double(middle[i]) * double(middle[i]);
      expected += double(x[i]) * double(x[i]);
      changed = std::max(changed, std::fabs(double(middle[i]) - double(x[i])));
    }
    EXPECT_NEAR(squares / expected, 1, 1e-5) << "orthonormal";
    if (tiles.elements() == 1) continue;
    EXPECT_GT(changed, 0.01) << "control: it transforms";
  }
}

TEST(Dct, AConstantTileHasOneCoefficient) {
  const DctTiles tiles = DctTiles::of(64, 64, 64);
  std::vector<float> x(64 * 64, 0.25f), found(x.size());
  dct_forward(kHost, tiles, 1, tensor_of(x), tensor_of(found));
  EXPECT_NEAR(found[0], 0.25 * 64, 1e-4);
  for (size_t i = 1; i < found.size(); ++i) ASSERT_NEAR(found[i], 0, 1e-5) << i;
}

TEST(Dct, WrongSizesAreRefused) {
  const auto refusal = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(refusal([] { DctTiles::of(4, 4, 65); }), "dct: tile 65: expected 1 to 64");
  EXPECT_EQ(refusal([] { DctTiles::of(0, 4, 64); }),
            "dct: matrix 0 x 4: expected sizes of at least 1");
  std::vector<float> x(16), y(15);
  EXPECT_THAT(
      refusal([&] { dct_forward(kHost, DctTiles::of(4, 4, 4), 1, tensor_of(x), tensor_of(y)); }),
      testing::HasSubstr("dct_forward: coefficients f32[15]"));
}

}  // namespace
}  // namespace tandem
