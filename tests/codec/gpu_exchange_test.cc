// GPU collectives over wire formats, phase by phase, on emulated warps (on_cpu/warp.h): results
// equal the CPU ranks'. Synchronization of ranks between phases is not tested here.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>

#include "collectives/cuda/encoded_chunks.cuh"
#include "collectives/cuda/encoded_tiles.cuh"
#include "collectives/cuda/lossless_chunks.cuh"
#include "tandem/codec.h"
#include "tandem/collectives.h"
#include "tandem/communicator.h"
#include "tandem/random.h"
#include "tests/codec/values.h"

namespace tandem::test {
namespace {

using namespace gpu;
using Floats = std::vector<float>;

struct Case {
  const char* wire;
  int64_t rows, row;
};

/// Memory of the ranks, as the kernels of one call see it.
struct Ranks {
  Wire wire;
  std::vector<Floats> data, out, residuals;
  std::vector<EncodedParams> rank_params;

  Ranks(const Case& c, int count, bool feedback) : wire(Wire::parse(c.wire)) {
    const int64_t largest = c.rows * c.row;
    const size_t slot = (wire.bytes(largest, DType::f32) + 255) / 256 * 256;
    for (int r = 0; r < count; ++r) {
      Floats values(static_cast<size_t>(largest), 0);
      for (int64_t i = 0; i < largest; ++i) {
        const float x = uniform(uint64_t(100 + r), i);
        values[size_t(i)] = i % 301 == 17 ? 50 * x : x;
      }
      data.push_back(values);
      out.emplace_back(values.size());
      residuals.emplace_back(values.size());
      staging_.emplace_back(2 * size_t(count) * slot / sizeof(uint4));
    }
    for (int r = 0; r < count; ++r) {
      EncodedParams params{};
      for (int p = 0; p < count; ++p) {
        params.exchange.table.memory[p] = reinterpret_cast<std::byte*>(staging_[size_t(p)].data());
        const Shard shard = shard_of(c.rows, count, p);
        params.begins[p] = shard.begin * c.row;
        params.wires[p] = WireParams::of(wire, shard.count * c.row, DType::f32);
      }
      params.exchange.table.rank = r, params.exchange.table.size = count;
      params.exchange.in = data[size_t(r)].data(), params.exchange.out = out[size_t(r)].data();
      params.exchange.slot_bytes = slot;
      params.dtype = DType::f32;
      params.residual = feedback ? residuals[size_t(r)].data() : nullptr;
      rank_params.push_back(params);
    }
  }
  /// Runs a phase on all ranks, with the warp that starts at thread `first` of a block.
  template <typename Phase>
  void run(const Phase& phase, int first = 0) {
    static Warp warp;
    with_block(wire, [&]<typename Block>() {
      for (const EncodedParams& params : rank_params) {
        warp.run([&] { phase.template operator()<Block>(params); }, first);
      }
    });
  }

 private:
  std::vector<std::vector<uint4>> staging_;
};

Tensor tensor_of(Floats& values, const Case& c, const Shard& rows) {
  return Tensor(values.data() + rows.begin * c.row, DType::f32, {rows.count, c.row});
}

/// Runs CPU ranks on the same data, in place.
template <typename Call>
void run_cpu_ranks(Ranks& ranks, const Call& call) {
  WorldOptions options;
  options.ranks = int(ranks.rank_params.size());
  run_threads(options, [&](Communicator& comm) { call(comm, size_t(comm.rank())); });
}

constexpr auto kItself = [](int peer) { return peer; };

class EncodedPhases : public testing::TestWithParam<int> {
 protected:
  static std::vector<Case> cases() {
    return {{"int8", 1111, 3},
            {"int4:g32", 64, 128},
            {"int5:asym", 900, 2},
            {"mxfp4", 40, 64},
            {"int2:g64:asym:spikes", 777, 5},
            {"int4:hadamard", 300, 10}};
  }
};

TEST_P(EncodedPhases, SumsMatchTheCpuRanks) {
  for (const Case& c : cases()) {
    for (const bool feedback : {false, true}) {
      const std::string what = fmt::format("{}{}", c.wire, feedback ? " with error feedback" : "");
      Ranks ranks({c.wire, c.rows * c.row, 1}, GetParam(), feedback);
      Ranks cpu({c.wire, c.rows * c.row, 1}, GetParam(), feedback);
      run_cpu_ranks(cpu, [&](Communicator& comm, size_t r) {
        const Tensor residual(cpu.residuals[r].data(), DType::f32, {c.rows * c.row});
        all_reduce(comm, Tensor(cpu.data[r].data(), DType::f32, {c.rows * c.row}), cpu.wire,
                   feedback ? &residual : nullptr);
      });
      if (GetParam() == 2 || ranks.wire.bytes(c.rows * c.row, DType::f32) <= 4096) {
        for (EncodedParams& params : ranks.rank_params) {
          params.wires[0] = WireParams::of(ranks.wire, c.rows * c.row, DType::f32);
        }
        ranks.run([&]<typename Block>(const EncodedParams& params) {
          push_to_all<Block>(params, params.wires[0], {params.residual, c.rows * c.row},
                             params.exchange.in, nullptr, 0, kItself);
        });
        ranks.run([&]<typename Block>(const EncodedParams& params) {
          const PeerTable& table = params.exchange.table;
          add_messages<Block>({slot_of(params, table.rank, 0), params.exchange.slot_bytes,
                               table.size, -1, nullptr, params.dtype},
                              params.wires[0], params.exchange.out);
        });
      } else {
        ranks.run([&]<typename Block>(const EncodedParams& params) {
          push_shards<Block>(params, 0, kItself);
        });
        ranks.run([&]<typename Block>(const EncodedParams& params) {
          push_sum<Block>(params, 0, params.exchange.table.size);
        });
        ranks.run([&]<typename Block>(const EncodedParams& params) {
          take_shards<Block>(params, params.exchange.table.size);
        });
      }
      EXPECT_TRUE(ranks.out == cpu.data) << what;
      EXPECT_TRUE(ranks.residuals == cpu.residuals) << what;
    }
  }
}

// An emulated link is charged for each tile's bytes of a message: none for an empty tile.
TEST(Tiles, BytesAddUpToTheMessage) {
  constexpr int kBlocks = 24, kWarps = 15;
  for (const char* const name : {"int8", "int6", "int4:g32", "mxfp4"}) {
    for (const int64_t elements : {8, 128, 100'000, 4'000'000, 8 << 20}) {
      const WireParams wire = WireParams::of(Wire::parse(name), elements, DType::bf16);
      const int64_t maximum = Tiles{0, kBlocks, kWarps}.count(wire) + 2;
      int64_t all = 0;
      for (int block = 0; block < kBlocks; ++block) {
        const Tiles tiles{block, kBlocks, kWarps};
        for (int64_t tile = 0; tile < maximum; ++tile) {
          const int64_t bytes = tiles.bytes(wire, tile);
          if (tiles.first_block(tile) >= wire.layout.blocks) {
            EXPECT_EQ(bytes, 0) << "empty";
          }
          all += bytes;
        }
      }
      EXPECT_GE(all, int64_t(wire.layout.bytes)) << name << ", " << elements;
      EXPECT_LE(all, int64_t(wire.layout.bytes) + kBlocks * maximum) << name << ", " << elements;
    }
  }
}

// The order of encoded_pipeline.cuh on two thread blocks of two warps each: the tiles of one step
// on all ranks, one after another.
TEST_P(EncodedPhases, SumsByTilesMatchTheCpuRanks) {
  constexpr int kBlocks = 2, kWarps = 2, kSumLag = 1, kTakeLag = 2;
  if (GetParam() == 2) GTEST_SKIP() << "two ranks send everything at once";
  for (Case c : cases()) {
    c.rows *= 20;
    const int64_t elements = c.rows * c.row;
    for (const bool feedback : {false, true}) {
      Ranks ranks({c.wire, elements, 1}, GetParam(), feedback);
      Ranks cpu({c.wire, elements, 1}, GetParam(), feedback);
      run_cpu_ranks(cpu, [&](Communicator& comm, size_t r) {
        const Tensor residual(cpu.residuals[r].data(), DType::f32, {elements});
        all_reduce(comm, Tensor(cpu.data[r].data(), DType::f32, {elements}), cpu.wire,
                   feedback ? &residual : nullptr);
      });
      const int size = GetParam();
      const auto step = [&](int64_t tile, const auto& work) {
        for (int block = 0; block < kBlocks; ++block) {
          const Tiles tiles{block, kBlocks, kWarps};
          if (tile < 0 || tile >= tiles.count(ranks.rank_params[0].wires[0])) continue;
          for (int warp = 0; warp < kWarps; ++warp) {
            ranks.run(
                [&]<typename Block>(const EncodedParams& params) {
                  work.template operator()<Block>(params, tiles, tile);
                },
                32 * warp);
          }
        }
      };
      const int64_t count = Tiles{0, kBlocks, kWarps}.count(ranks.rank_params[0].wires[0]);
      EXPECT_GT(count, 1) << c.wire;
      for (int64_t s = 0; s < count + kSumLag + kTakeLag; ++s) {
        step(s, [&]<typename Block>(const EncodedParams& params, const Tiles& tiles, int64_t tile) {
          push_tile<Block>(params, tiles, tile, 0, kItself);
        });
        step(s - kSumLag,
             [&]<typename Block>(const EncodedParams& params, const Tiles& tiles, int64_t tile) {
               sum_tile<Block>(params, tiles, tile, 0, size);
             });
        step(s - kSumLag - kTakeLag,
             [&]<typename Block>(const EncodedParams& params, const Tiles& tiles, int64_t tile) {
               take_tile<Block>(params, tiles, tile, size);
             });
      }
      EXPECT_TRUE(ranks.out == cpu.data) << c.wire;
      EXPECT_TRUE(ranks.residuals == cpu.residuals) << c.wire;
    }
  }
}

TEST_P(EncodedPhases, ReduceScatterMatchesTheCpuRanks) {
  for (const Case& c : cases()) {
    for (const bool feedback : {false, true}) {
      Ranks ranks(c, GetParam(), feedback), cpu(c, GetParam(), feedback);
      std::vector<Floats> expected(cpu.data.size());
      run_cpu_ranks(cpu, [&](Communicator& comm, size_t r) {
        const Shard rows = shard_of(c.rows, comm.size(), comm.rank());
        expected[r].resize(size_t(rows.count * c.row));
        const Tensor residual(cpu.residuals[r].data(), DType::f32, {c.rows, c.row});
        reduce_scatter(comm, tensor_of(cpu.data[r], c, {0, c.rows}),
                       Tensor(expected[r].data(), DType::f32, {rows.count, c.row}), cpu.wire,
                       feedback ? &residual : nullptr);
      });
      ranks.run([&]<typename Block>(const EncodedParams& params) {
        push_shards<Block>(params, 0, kItself);
      });
      ranks.run([&]<typename Block>(const EncodedParams& params) {
        add_messages<Block>(sum_of_shard(params, 0), params.wires[params.exchange.table.rank],
                            params.exchange.out);
      });
      for (size_t r = 0; r < expected.size(); ++r) {
        ranks.out[r].resize(expected[r].size());
        EXPECT_TRUE(ranks.out[r] == expected[r]) << c.wire << ", rank " << r;
      }
      EXPECT_TRUE(ranks.residuals == cpu.residuals) << c.wire;
    }
  }
}

TEST_P(EncodedPhases, AllGatherMatchesTheCpuRanks) {
  for (const Case& c : cases()) {
    Ranks ranks(c, GetParam(), false), cpu(c, GetParam(), false);
    run_cpu_ranks(cpu, [&](Communicator& comm, size_t r) {
      const Shard rows = shard_of(c.rows, comm.size(), comm.rank());
      all_gather(comm, tensor_of(cpu.data[r], c, rows), tensor_of(cpu.out[r], c, {0, c.rows}),
                 cpu.wire);
    });
    ranks.run([&]<typename Block>(const EncodedParams& params) {
      const int rank = params.exchange.table.rank;
      push_to_all<Block>(params, params.wires[rank], {},
                         shard_of_params(params, params.exchange.in, rank),
                         shard_of_params(params, params.exchange.out, rank), 0, kItself);
    });
    ranks.run([&]<typename Block>(const EncodedParams& params) { take_shards<Block>(params, 0); });
    EXPECT_TRUE(ranks.out == cpu.out) << c.wire;
  }
}

TEST(EncodedChunks, DecodeLikeTheCpusMessage) {
  static Warp warp;
  for (const char* name : {"int8", "int4:g32", "int5:asym", "mxfp4", "int2:g64:asym:spikes",
                           "int4:hadamard", "int8:g16:asym:f32"}) {
    const Wire wire = Wire::parse(name);
    const WireParams chunk = WireParams::of(wire, kChunkElements, DType::f32);
    std::vector<uint4> slot(chunk.layout.bytes / sizeof(uint4));
    auto* const message = reinterpret_cast<std::byte*>(slot.data());
    for (const int64_t count : {int64_t(1), int64_t(129), int64_t(5000), kChunkElements}) {
      Floats values(size_t(count), 0), decoded(values.size());
      for (int64_t i = 0; i < count; ++i) values[size_t(i)] = uniform(12, i) * float(i % 7);
      with_block(wire, [&]<typename Block>() {
        warp.run([&] { encode_chunk<Block>(chunk, DType::f32, values.data(), count, message); });
        warp.run([&] { decode_chunk<Block>(chunk, DType::f32, message, count, decoded.data()); });
      });
      std::vector<std::byte> expected_message(wire.bytes(count, DType::f32));
      Floats expected(values.size());
      encode(wire, Tensor(values.data(), DType::f32, {count}), expected_message);
      decode(wire, expected_message, Tensor(expected.data(), DType::f32, {count}));
      EXPECT_TRUE(decoded == expected) << name << ", " << count;
    }
  }
}

TEST(LosslessChunks, EveryBitRoundTrips) {
  static Warp warp;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const size_t size = size_of(dtype);
    const LosslessParams whole = whole_chunk(dtype);
    std::vector<uint4> slot(kLosslessChunkBytes / sizeof(uint4) + 16);
    auto* const message = reinterpret_cast<std::byte*>(slot.data());
    for (const int64_t count : {whole.elements, whole.elements - 77, int64_t(900)}) {
      for (const uint32_t one_in : {0u, 1u, 300u}) {  // values of which some or all need an escape
        std::vector<std::byte> values(size_t(count) * size), found(values.size());
        for (int64_t i = 0; i < count; ++i) {
          const auto random = philox(5, one_in, uint64_t(i));
          const bool any = one_in && random[1] % one_in == 0;
          const float x = normal(6, 7, uint64_t(i)) * (any ? 0x1p-40f : 1.0f);
          const uint32_t word = one_in == 1 ? random[0] : std::bit_cast<uint32_t>(x);
          const auto half = uint16_t(word >> 16);
          std::memcpy(&values[size * size_t(i)],
                      size == 4 ? static_cast<const void*>(&word) : &half, size);
        }
        const LosslessParams params = chunk_of(whole, count);
        const auto passes = [&](int number, const auto& pass) {
          for (int p = 0; p < number; ++p) {
            for (int w = 0; w < kChunkWarps; ++w) warp.run([&] { pass(p); }, 32 * w);
          }
        };
        passes(3, [&](int p) { encode_chunk_pass(params, p, values.data(), message); });
        const size_t used = used_bytes(params, message);
        EXPECT_LE(used, 16 + values.size());
        const bool coded = used != 16 + values.size();
        EXPECT_EQ(coded, count > 1000 && one_in != 1) << count << " one in " << one_in;
        if (!coded) continue;
        EXPECT_LE(double(used), double(values.size()) * (size == 4 ? 0.9 : 0.78));
        passes(2, [&](int p) { decode_chunk_pass(params, p, message, found.data()); });
        EXPECT_TRUE(found == values) << name_of(dtype) << " " << count << " one in " << one_in;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Codec, EncodedPhases, testing::Values(2, 3, 4));
INSTANTIATE_TEST_SUITE_P(CodecLong, EncodedPhases, testing::Values(8));

}  // namespace
}  // namespace tandem::test
