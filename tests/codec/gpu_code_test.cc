// The GPU codec code on an emulated warp (on_cpu/warp.h) gives the CPU's bytes and values.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>

#include "codec/cuda/lossless.cuh"
#include "codec/cuda/sum.cuh"
#include "tandem/codec.h"
#include "tandem/tensor.h"
#include "tests/codec/bytes.h"
#include "tests/codec/values.h"

namespace tandem::test {
namespace {

using namespace gpu;

Warp& warp() {
  static Warp all;
  return all;
}

/// Encodes or decodes like a kernel of one warp.
template <typename With>
void for_all_blocks(int64_t count, const With& with) {
  warp().run([&] { for_blocks(count, with); });
}

/// Memory aligned to 16 bytes, followed by guard bytes that must not be written.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes), vecs_(bytes / 16 + 2) { fill(); }
  std::byte* data() { return reinterpret_cast<std::byte*>(vecs_.data()); }
  void fill() { std::memset(vecs_.data(), 0xa5, 16 * vecs_.size()); }
  /// First byte that differs from `expected`, or "past the end" if a guard byte was overwritten.
  std::string difference(const Bytes& expected, size_t skip = 0) {
    for (size_t i = 0; i < expected.size(); ++i) {
      if (data()[skip + i] != expected[i]) return fmt::format("byte {} of {}", i, expected.size());
    }
    for (size_t i = bytes_; i < 16 * vecs_.size(); ++i) {
      if (data()[i] != std::byte{0xa5}) return "past the end";
    }
    return "";
  }

 private:
  size_t bytes_;
  std::vector<uint4> vecs_;
};

class GpuCode : public testing::TestWithParam<std::string> {};

TEST_P(GpuCode, GivesTheCpusBytesAndValues) {
  const Wire wire = Wire::parse(GetParam());
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const int64_t count : {5, 129, 1100}) {
      const WireParams params = WireParams::of(wire, count, dtype);
      for (const Input& input : any_inputs(count)) {
        Bytes values = stored_as(dtype, input.values);
        Bytes expected(wire.bytes(count, dtype)), decoded(values.size());
        encode(wire, Tensor(values.data(), dtype, {count}), expected);
        decode(wire, expected, Tensor(decoded.data(), dtype, {count}));
        const size_t skip = count == 129 ? size_of(dtype) : 0;
        Memory memory(skip + values.size()), message(expected.size());
        std::memcpy(memory.data() + skip, values.data(), values.size());
        with_block(wire, [&]<typename Block>() {
          warp().run([&] { clear_between(params, message.data(), int(threadIdx.x)); });
          for_all_blocks(params.layout.blocks, [&](int64_t block, int lane, bool on) {
            float x[kLaneValues];
            load_elements(memory.data() + skip, dtype, count, block, lane, on, x);
            Block encoded;
            encoded.encode(params, x, lane);
            encoded.store(params, message.data(), block, lane, on);
          });
          memory.fill();
          for_all_blocks(params.layout.blocks, [&](int64_t block, int lane, bool on) {
            Block encoded;
            encoded.load(params, message.data(), block, lane);
            float x[kLaneValues];
            encoded.decode(params, lane, x);
            store_elements(memory.data() + skip, dtype, count, block, lane, on, x);
          });
        });
        const std::string what = fmt::format("{} {} {}", name_of(dtype), count, input.name);
        ASSERT_EQ(message.difference(expected), "") << what;
        ASSERT_EQ(memory.difference(decoded, skip), "") << what << ", decoded";
      }
    }
  }
}

std::string transport_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Codec, GpuCode, testing::ValuesIn(all_wires()), transport_name);

TEST(GpuCodeForSums, AddsMessagesInRankOrder) {
  constexpr int kRanks = 4, kLocalRank = 2;
  constexpr int64_t kCount = 1000;
  for (const char* name : {"int8", "int4:g32", "int5:asym", "int2:g64:spikes", "int4:hadamard"}) {
    const Wire wire = Wire::parse(name);
    const WireParams params = WireParams::of(wire, kCount, DType::f32);
    const size_t stride = (wire.bytes(kCount, DType::f32) + 255) / 256 * 256;
    Memory messages(kRanks * stride);
    std::vector<float> local, expected(kCount);
    for (int r = 0; r < kRanks; ++r) {
      std::vector<float> values(kCount), decoded(kCount);
      for (int64_t i = 0; i < kCount; ++i) values[size_t(i)] = normal(5, uint64_t(r), uint64_t(i));
      const std::span<std::byte> message(messages.data() + size_t(r) * stride, stride);
      encode(wire, Tensor(values.data(), DType::f32, {kCount}), message);
      decode(wire, message, Tensor(decoded.data(), DType::f32, {kCount}));
      if (r == kLocalRank) local = decoded = values;
      for (size_t i = 0; i < decoded.size(); ++i) expected[i] += decoded[i];
    }
    std::vector<float> found(kCount);
    const MessageSum from{messages.data(), stride, kRanks, kLocalRank, local.data(), DType::f32};
    with_block(wire, [&]<typename Block>() {
      for_all_blocks(params.layout.blocks, [&](int64_t block, int lane, bool on) {
        float sum[kLaneValues];
        sum_messages<Block>(from, params, block, lane, on, sum);
        store_elements(found.data(), DType::f32, kCount, block, lane, on, sum);
      });
    });
    EXPECT_EQ(found, expected) << name;
  }
}

/// Values of which some, few or all need an escape.
std::vector<float> escaping(int64_t count, uint32_t one_in) {
  std::vector<float> values(size_t(count), 0);
  for (int64_t i = 0; i < count; ++i) {
    const auto random = philox(7, one_in, uint64_t(i));
    const bool any = one_in && random[1] % one_in == 0;
    values[size_t(i)] = any ? std::bit_cast<float>(random[0]) : normal(8, 9, uint64_t(i));
  }
  return values;
}

TEST(LosslessGpuCode, GivesTheCpusBytes) {
  const Wire wire = Wire::parse("lossless");
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const int64_t count : {1024, 1025, 1100, 8193, 20001, 530000}) {
      for (const uint32_t one_in : {0, 1, 5, 50}) {
        if (count > 100000 && one_in != 50) continue;
        const std::vector<float> input = escaping(count, one_in);
        Bytes values(input.size() * size_of(dtype));
        for (size_t i = 0; i < input.size(); ++i) {  // all bit patterns, NaN included
          const uint32_t word = std::bit_cast<uint32_t>(input[i]);
          const auto half = uint16_t(word >> 16);
          const size_t size = size_of(dtype);
          std::memcpy(&values[size * i], size == 4 ? static_cast<const void*>(&word) : &half, size);
        }
        Bytes expected(wire.bytes(count, dtype));
        expected.resize(codec::encode_lossless(dtype, values.data(), count, expected.data()));
        const size_t skip = count % 2 ? size_of(dtype) : 0;
        Memory memory(skip + values.size()), message(wire.bytes(count, dtype));
        std::memcpy(memory.data() + skip, values.data(), values.size());
        const std::string what = fmt::format("{} {} one in {}", name_of(dtype), count, one_in);

        const LosslessParams params = LosslessParams::of(count, dtype);
        warp().run([&] { clear_between(params, message.data(), int(threadIdx.x)); });
        for (int64_t tile = 0; tile < params.tiles; ++tile) {
          warp().run([&] {
            encode_tile(params, memory.data() + skip, tile, int(threadIdx.x), message.data());
          });
        }
        for (int64_t scan_block = 0; scan_block * kScanGroups < params.groups; ++scan_block) {
          warp().run([&] { sum_escapes(params, scan_block, int(threadIdx.x), message.data()); });
        }
        uint32_t header[2];
        std::memcpy(header, message.data(), sizeof header);
        if (header[0] == 0) {  // stored raw
          ASSERT_EQ(expected.size(), wire.bytes(count, dtype)) << what;
          continue;
        }
        for (int64_t group = 0; group < params.groups; group += 32) {
          warp().run([&] {
            write_escapes(params, memory.data() + skip, group, int(threadIdx.x), message.data());
          });
        }
        ASSERT_EQ(params.layout.escapes + header[1], expected.size()) << what;
        ASSERT_EQ(message.difference(expected), "") << what;
        memory.fill();
        for (int64_t block = 0; block < params.blocks; block += 8) {
          warp().run([&] {
            decode_blocks(params, message.data(), block, int(threadIdx.x), memory.data() + skip);
          });
        }
        for (int64_t group = 0; group < params.groups; group += 32) {
          warp().run([&] {
            decode_escapes(params, message.data(), group, int(threadIdx.x), memory.data() + skip);
          });
        }
        ASSERT_EQ(memory.difference(values, skip), "") << what << ", decoded";
      }
    }
  }
}

}  // namespace
}  // namespace tandem::test
