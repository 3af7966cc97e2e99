// Tiles of the GPU's GEMM and chunks of its operands in a wire format, on emulated warps: the group
// of each accumulator, and the values added at the receiver.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "codec/cuda/encoded_chunk.cuh"
#include "gemm/cuda/tile_codec.cuh"
#include "tandem/codec.h"
#include "tests/codec/values.h"

namespace tandem::test {
namespace {

using namespace gpu;
constexpr int kRows = 64, kColumns = 256;

/// Row and column of a warpgroup's accumulators (PTX: wgmma's D of m64n256).
int row_of(int thread, int sum) {
  return 16 * (thread / 32) + thread % 32 / 4 + 8 * (sum / 2 % 2);
}
int column_of(int thread, int sum) {
  return 8 * (sum / 4) + 2 * (thread % 4) + sum % 2;
}

template <class Tile, class Body>
void for_warps(const Body& body) {
  static Warp warp;
  for (int w = 0; w < 4; ++w) {
    warp.run([&] { body(32 * w + int(threadIdx.x)); });
  }
}

template <class Code, int kGroup>
void expect_cpus_values(const char* name) {
  using Tile = fused::TileCodec<Code, kGroup>;
  const Wire wire = Wire::parse(name);
  for (const Input& input : any_inputs(kRows * kColumns)) {
    std::vector<float> expected(input.values.size());
    for (int row = 0; row < kRows; ++row) {
      const auto of_row = [&](const std::vector<float>& all) {
        return Tensor(const_cast<float*>(&all[size_t(row * kColumns)]), DType::f32, {kColumns});
      };
      std::vector<std::byte> message(wire.bytes(kColumns, DType::f32));
      encode(wire, of_row(input.values), message);
      decode(wire, message, of_row(expected));
    }
    std::vector<uint4> slice(Tile::kSliceBytes / 16 + 1);
    std::memset(slice.data(), 0xa5, 16 * slice.size());
    auto* const bytes = reinterpret_cast<std::byte*>(slice.data());
    for_warps<Tile>([&](int thread) {
      float sums[Tile::kSums];
      for (int i = 0; i < Tile::kSums; ++i) {
        sums[i] = input.values[size_t(row_of(thread, i) * kColumns + column_of(thread, i))];
      }
      uint32_t stored[64];
      Tile::encode(sums, codec::largest_of(DType::f32), thread % 32, stored);
      for (int box = 0; box < Tile::kBoxes; ++box) {
        Tile::write(stored, box, bytes + box * Tile::kBoxBytes, thread);
      }
    });
    EXPECT_EQ(slice.back().x, 0xa5a5a5a5u) << "past the end";
    std::vector<float> found(input.values.size());
    for_warps<Tile>([&](int thread) {
      float sums[Tile::kSums] = {};
      Tile::add(sums, bytes, thread);
      for (int i = 0; i < Tile::kSums; ++i) {
        found[size_t(row_of(thread, i) * kColumns + column_of(thread, i))] = sums[i];
      }
    });
    for (size_t i = 0; i < found.size(); ++i) {
      const bool same = std::isnan(expected[i]) ? std::isnan(found[i]) : found[i] == expected[i];
      ASSERT_TRUE(same) << name << ", " << input.name << ", element " << i << ": " << found[i]
                        << ", expected " << expected[i];
    }
  }
}

TEST(GpuTile, GivesTheValuesOfEachRowsMessage) {
  expect_cpus_values<codec::Integer<8>, 128>("int8");
  expect_cpus_values<codec::Integer<8>, 32>("int8:g32");
  expect_cpus_values<codec::Integer<4>, 128>("int4");
  expect_cpus_values<codec::Integer<4>, 32>("int4:g32");
  expect_cpus_values<codec::E4M3, 128>("e4m3");
  expect_cpus_values<codec::E4M3, 32>("e4m3:g32");
}

TEST(GpuTile, DecodedValuesAreAdded) {
  using Tile = fused::TileCodec<codec::Integer<8>, 128>;
  std::vector<uint4> slice(Tile::kSliceBytes / 16);
  auto* const bytes = reinterpret_cast<std::byte*>(slice.data());
  for_warps<Tile>([&](int thread) {
    float sums[Tile::kSums];
    for (int i = 0; i < Tile::kSums; ++i) {
      sums[i] = float((row_of(thread, i) * 7 + column_of(thread, i)) % 128);
    }
    sums[0] = thread % 4 == 0 ? 127.0f : sums[0];
    uint32_t stored[64];
    Tile::encode(sums, codec::largest_of(DType::f32), thread % 32, stored);
    for (int box = 0; box < 4; ++box) {
      Tile::write(stored, box, bytes + box * Tile::kBoxBytes, thread);
    }
    float twice[Tile::kSums];
    for (int i = 0; i < Tile::kSums; ++i) twice[i] = sums[i];
    Warp::current()->all_of(0);
    Tile::add(twice, bytes, thread);
    for (int i = 0; i < Tile::kSums; ++i) EXPECT_NEAR(twice[i], 2 * sums[i], 0.51f);
  });
}

TEST(GpuTile, EveryAccumulatorHasOnePosition) {
  using Tile = fused::TileCodec<codec::Integer<8>, 128>;
  std::set<int> seen;
  for (int box = 0; box < Tile::kBoxes; ++box) {
    for (int e = 0; e < kLaneValues; ++e) {
      const int sum = Tile::sum_at(box, e);
      EXPECT_TRUE(seen.insert(sum).second);
      for (int lane = 0; lane < 4; ++lane) {
        // A block's elements stay within their group of 16.
        EXPECT_EQ(column_of(lane, sum) / 16, 8 * (box / 2) + e / 4);
        EXPECT_EQ(row_of(lane, sum), 8 * (box % 2));
      }
    }
  }
  EXPECT_EQ(seen.size(), size_t(Tile::kSums));
}

template <class Code, int kGroup>
void expect_cpus_chunks(const char* name) {
  using Chunk = EncodedChunk<Code, kGroup, Warp::kThreads>;
  const Wire wire = Wire::parse(name);
  for (const Input& input : any_inputs(Chunk::kElements)) {
    std::vector<float> values = input.values, expected(values.size()), found(values.size());
    std::vector<std::byte> message(wire.bytes(Chunk::kElements, DType::f32));
    encode(wire, Tensor(values.data(), DType::f32, {Chunk::kElements}), message);
    decode(wire, message, Tensor(expected.data(), DType::f32, {Chunk::kElements}));
    std::vector<uint4> memory(Chunk::kBytes / 16 + 1);
    std::memset(memory.data(), 0xa5, 16 * memory.size());
    auto* const bytes = reinterpret_cast<std::byte*>(memory.data());
    static Warp warp;
    const auto index_of = [](int lane, int e) {
      return size_t(lane / kQuad * kWireBlock + 16 * (e / 4) + 4 * (lane % kQuad) + e % 4);
    };
    warp.run([&] {
      const int lane = int(threadIdx.x);
      float x[kLaneValues];
      for (int e = 0; e < kLaneValues; ++e) x[e] = values[index_of(lane, e)];
      Chunk chunk;
      chunk.encode(x, codec::largest_of(DType::f32), lane);
      chunk.store(bytes, lane);
    });
    EXPECT_EQ(memory.back().x, 0xa5a5a5a5u) << "past the end";
    warp.run([&] {
      const int lane = int(threadIdx.x);
      Chunk::for_values_of(
          bytes, lane, [](const auto* from) { return *from; },
          [&](int e, float code, float scale) { found[index_of(lane, e)] = code * scale; });
    });
    for (size_t i = 0; i < found.size(); ++i) {
      const bool same = std::isnan(expected[i]) ? std::isnan(found[i]) : found[i] == expected[i];
      ASSERT_TRUE(same) << name << ", " << input.name << ", element " << i;
    }
  }
}

TEST(GpuChunk, GivesTheMessagesValues) {
  expect_cpus_chunks<codec::Integer<8>, 128>("int8");
  expect_cpus_chunks<codec::Integer<4>, 128>("int4");
  expect_cpus_chunks<codec::Integer<4>, 32>("int4:g32");
  expect_cpus_chunks<codec::E4M3, 32>("e4m3:g32");
}

}  // namespace
}  // namespace tandem::test
