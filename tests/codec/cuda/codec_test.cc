// Wire formats on the GPU give the bytes and values of the CPU.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "codec/cuda/encode.h"
#include "core/cuda/handles.h"
#include "tandem/random.h"
#include "tests/codec/bytes.h"
#include "tests/codec/values.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

using namespace gpu;

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

Bytes read_bytes(const DeviceMemory& memory, size_t bytes, cudaStream_t stream) {
  Bytes all(bytes);
  check(cudaMemcpyAsync(all.data(), memory.data(), bytes, cudaMemcpyDeviceToHost, stream), "read");
  check(cudaStreamSynchronize(stream), "read");
  return all;
}

void write_bytes(const DeviceMemory& memory, size_t skip, const Bytes& bytes, cudaStream_t stream) {
  check(cudaMemcpyAsync(memory.data() + skip, bytes.data(), bytes.size(), cudaMemcpyHostToDevice,
                        stream),
        "write");
  check(cudaStreamSynchronize(stream), "write");
}

class GpuCodecs : public testing::TestWithParam<std::string> {};

TEST_P(GpuCodecs, MatchTheCpuBytesAndValues) {
  if (gpu_count() == 0) GTEST_SKIP() << "needs a GPU";
  const Wire wire = Wire::parse(GetParam());
  const Stream stream;
  constexpr int64_t kMax = 5000;
  const DeviceMemory device(kMax * 4 + 64), message_memory(kMax * 8 + 4096);
  for (const DType dtype : kDTypes) {
    for (const int64_t count : {1, 5, 127, 128, 129, 1000, 2049, 5000}) {
      for (const Input& input : any_inputs(count)) {
        Bytes values = stored_as(dtype, input.values);
        Bytes expected(wire.bytes(count, dtype), std::byte{0xa5});
        encode(wire, host_tensor(values, dtype), expected);
        Bytes decoded(values.size());
        decode(wire, expected, host_tensor(decoded, dtype));
        for (const size_t skip : {size_t(0), size_of(dtype)}) {  // aligned and unaligned
          const std::string what = fmt::format("{} {} {} from {}: {}", name_of(dtype), count,
                                               input.name, skip, wire.describe());
          const Tensor x(device.data() + skip, dtype, {count}, Device{DeviceKind::cuda, 0});
          write_bytes(device, skip, values, stream.get());
          check(cudaMemsetAsync(message_memory.data(), 0xa5, expected.size(), stream.get()),
                "poison");
          launch_encode(wire, x, message_memory.data(), stream.get());
          const Bytes message = read_bytes(message_memory, expected.size(), stream.get());
          ASSERT_EQ(difference(expected, message), "") << what;
          check(cudaMemsetAsync(device.data(), 0xff, skip + values.size(), stream.get()), "poison");
          launch_decode(wire, message_memory.data(), x, stream.get());
          Bytes found = read_bytes(device, skip + values.size(), stream.get());
          found.erase(found.begin(), found.begin() + std::ptrdiff_t(skip));
          ASSERT_EQ(difference(decoded, found), "") << what << ", decoded";
        }
      }
    }
  }
}

std::string transport_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Gpu, GpuCodecs, testing::ValuesIn(all_wires()), transport_name);

TEST(GpuCodec, LosslessMatchesTheCpuBytes) {
  if (gpu_count() == 0) GTEST_SKIP() << "needs a GPU";
  const Wire wire = Wire::parse("lossless");
  const Stream stream;
  constexpr int64_t kMax = 3000001;
  const DeviceMemory device(kMax * 4 + 64), message_memory(kMax * 4 + 64);
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const int64_t count : {int64_t(7), int64_t(1023), int64_t(1024), int64_t(8193), kMax}) {
      for (const uint64_t one_in : {0, 1, 100}) {  // values that may need an escape
        std::vector<float> input(static_cast<size_t>(count), 0);
        for (int64_t i = 0; i < count; ++i) {
          const auto random = philox(3, one_in, uint64_t(i));
          const bool any = one_in && random[0] % one_in == 0;
          input[size_t(i)] = any ? std::ldexp(1.0f, int(random[1] % 250) - 124)
                                 : float(int32_t(random[2])) * 0x1p-31f;
        }
        Bytes values = stored_as(dtype, input), expected(wire.bytes(count, dtype));
        expected.resize(encode(wire, host_tensor(values, dtype), expected));
        const size_t skip = count % 2 ? size_of(dtype) : 0;
        const std::string what = fmt::format("{} {} one in {}", name_of(dtype), count, one_in);
        const Tensor x(device.data() + skip, dtype, {count}, Device{DeviceKind::cuda, 0});
        write_bytes(device, skip, values, stream.get());
        launch_encode(wire, x, message_memory.data(), stream.get());
        const Bytes message = read_bytes(message_memory, expected.size(), stream.get());
        ASSERT_EQ(difference(expected, message), "") << what;
        check(cudaMemsetAsync(device.data(), 0xff, skip + values.size(), stream.get()), "poison");
        launch_decode(wire, message_memory.data(), x, stream.get());
        Bytes found = read_bytes(device, skip + values.size(), stream.get());
        found.erase(found.begin(), found.begin() + std::ptrdiff_t(skip));
        ASSERT_EQ(difference(values, found), "") << what << ", decoded";
      }
    }
  }
}

TEST(GpuCodec, RejectsFormatsThatGpusLack) {
  if (gpu_count() == 0) GTEST_SKIP() << "needs a GPU";
  const DeviceMemory memory(256);
  const Tensor x(memory.data(), DType::bf16, {64}, Device{DeviceKind::cuda, 0});
  EXPECT_THROW(
      launch_sum(Wire::parse("lossless"), memory.data(), 128, 1, -1, x, nullptr, x, nullptr),
      Unsupported);
  EXPECT_THROW(launch_encode(Wire::parse("int8"), x, memory.data() + 8, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace tandem::test
