// Sparse messages on the GPU have the bytes, errors and means of the CPU.
#include "codec/topk.h"

#include <fmt/format.h>

#include <cstring>

#include "core/cuda/handles.h"
#include "tests/codec/bytes.h"
#include "tests/codec/values.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

using namespace gpu;
using codec::TopK;
using codec::TopKMean;

const Exec kHost;

struct OnDevice {
  DeviceMemory memory;
  Tensor tensor;

  OnDevice(const Exec& exec, const std::vector<float>& values)
      : memory(4 * values.size() + 4),
        tensor(memory.data(), DType::f32, {int64_t(values.size())}, exec.device) {
    copy(exec, Tensor::of(std::span(values), {int64_t(values.size())}), tensor);
  }
  Bytes read(const Exec& exec) const {
    Bytes bytes(4 * size_t(tensor.elements()));
    copy(exec, tensor, host_tensor(bytes, DType::f32));
    return bytes;
  }
};

Bytes bytes_of(const std::vector<float>& values) {
  Bytes bytes(4 * values.size());
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

class GpuTopK : public testing::TestWithParam<TopK> {};
INSTANTIATE_TEST_SUITE_P(Gpu, GpuTopK,
                         testing::Values(TopK{4096, 64, 2}, TopK{4096, 4096, 8}, TopK{3000, 5, 3},
                                         TopK{64, 32, 8}, TopK{7, 7, 5}, TopK{1, 1, 2}),
                         [](const auto& instance) {
                           const TopK& topk = instance.param;
                           return fmt::format("chunk{}_k{}_bits{}", topk.chunk, topk.k, topk.bits);
                         });

TEST_P(GpuTopK, MatchesTheCpu) {
  if (gpu_count() == 0) GTEST_SKIP() << "needs a GPU";
  const TopK& topk = GetParam();
  const Stream stream;
  const Exec exec{Device{DeviceKind::cuda, 0}, stream.get()};
  for (const int64_t count : {int64_t(1), int64_t(4096), int64_t(20011)}) {
    const int64_t bytes = topk.bytes(count);
    std::vector<Input> inputs = any_inputs(count);
    Bytes messages(size_t(bytes) * inputs.size());
    const DeviceMemory on_device(messages.size());
    for (size_t n = 0; n < inputs.size(); ++n) {
      std::vector<float> error(inputs[n].values.size(), 0.5f);
      const OnDevice delta(exec, inputs[n].values), device_error(exec, error);
      std::byte* const message = &messages[n * size_t(bytes)];
      encode_topk(kHost, topk, 0.95f, Tensor::of(std::span(inputs[n].values), {count}),
                  Tensor::of(std::span(error), {count}), message);
      std::byte* const device_message = on_device.data() + n * size_t(bytes);
      encode_topk(exec, topk, 0.95f, delta.tensor, device_error.tensor, device_message);
      Bytes found(static_cast<size_t>(bytes));
      copy(exec, Tensor(device_message, DType::u8, {bytes}, exec.device),
           host_tensor(found, DType::u8));
      const Bytes expected(message, message + bytes);
      EXPECT_EQ(difference(expected, found), "") << inputs[n].name << ", " << count;
      if (inputs[n].name == "not finite") continue;  // NaN bits of a GPU are others
      EXPECT_EQ(difference(bytes_of(error), device_error.read(exec)), "") << inputs[n].name;
    }
    std::vector<const std::byte*> pointers, device_pointers;
    for (size_t n = 0; n + 1 < inputs.size(); ++n) {
      pointers.push_back(&messages[n * size_t(bytes)]);
      device_pointers.push_back(on_device.data() + n * size_t(bytes));
    }
    for (const TopKMean mean : {TopKMean::ranks, TopKMean::senders}) {
      std::vector<float> values(static_cast<size_t>(count));
      const OnDevice device_values(exec, values);
      mean_topk(kHost, topk, pointers, mean, Tensor::of(std::span(values), {count}));
      mean_topk(exec, topk, device_pointers, mean, device_values.tensor);
      EXPECT_EQ(difference(bytes_of(values), device_values.read(exec)), "") << count;
    }
  }
}

}  // namespace
}  // namespace tandem::test
