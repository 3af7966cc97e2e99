// gpu_codec_bench [ELEMENTS]: encoding and decoding on one GPU against a plain copy there that
// moves the same bytes. Checks the bytes against the CPU's in the same run. One JSON object a line.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "codec/cuda/encode.h"
#include "core/cuda/handles.h"
#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

using gpu::check;
using gpu::DeviceMemory;

constexpr int kRepeats = 31;
constexpr int64_t kChecked = 1 << 20;

/// gpu::Event keeps no time.
struct TimedEvent {
  cudaEvent_t event = nullptr;
  TimedEvent() { check(cudaEventCreate(&event), "make an event"); }
  ~TimedEvent() { cudaEventDestroy(event); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;
  cudaEvent_t get() const { return event; }
};

/// Medians in microseconds, the candidates in turn.
template <size_t kCount, typename Run>
std::array<double, kCount> medians(cudaStream_t stream, const Run& run) {
  std::array<std::vector<double>, kCount> times;
  const TimedEvent begin, end;
  for (int i = 0; i < kRepeats; ++i) {
    for (size_t which = 0; which < kCount; ++which) {
      check(cudaEventRecord(begin.get(), stream), "begin");
      run(which);
      check(cudaEventRecord(end.get(), stream), "end");
      check(cudaStreamSynchronize(stream), "a run");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "elapsed time");
      times[which].push_back(double(ms) * 1000);
    }
  }
  std::array<double, kCount> result;
  for (size_t which = 0; which < kCount; ++which) {
    std::ranges::nth_element(times[which], times[which].begin() + kRepeats / 2);
    result[which] = times[which][kRepeats / 2];
  }
  return result;
}

bool has_the_cpus_bytes(const Wire& wire, DType dtype, const Tensor& device, std::byte* message,
                        cudaStream_t stream) {
  const int64_t count = std::min(kChecked, device.elements());
  std::vector<std::byte> values(size_t(count) * size_of(dtype)), expected(wire.bytes(count, dtype)),
      found(expected.size());
  check(
      cudaMemcpyAsync(values.data(), device.data(), values.size(), cudaMemcpyDeviceToHost, stream),
      "read values");
  check(cudaStreamSynchronize(stream), "read values");
  encode(wire, Tensor(values.data(), dtype, {count}), expected);
  gpu::launch_encode(wire, Tensor(device.data(), dtype, {count}, device.device()), message, stream);
  check(cudaMemcpyAsync(found.data(), message, found.size(), cudaMemcpyDeviceToHost, stream),
        "read a message");
  check(cudaStreamSynchronize(stream), "read a message");
  return found == expected;
}

void bench(const Wire& wire, DType dtype, int64_t elements) {
  const gpu::Stream stream;
  const size_t bytes = size_t(elements) * size_of(dtype), sent = wire.bytes(elements, dtype);
  const size_t copied = (bytes + sent) / 2 / 256 * 256;  // read and written
  const DeviceMemory values(bytes), message(sent), from(copied), to(copied);
  std::vector<uint16_t> host(bytes / 2);
  for (size_t i = 0; i < host.size(); i += 4) {
    const auto random = philox(1, 2, i);
    for (size_t k = 0; k < 4 && i + k < host.size(); ++k) {  // around 1, of both signs
      host[i + k] = uint16_t((random[k] & 0x80ff) | 0x3f00);
    }
  }
  check(cudaMemcpyAsync(values.data(), host.data(), bytes, cudaMemcpyHostToDevice, stream.get()),
        "write values");
  check(cudaStreamSynchronize(stream.get()), "write values");
  const Tensor x = values.view(dtype, {elements});
  const bool right = has_the_cpus_bytes(wire, dtype, x, message.data(), stream.get());
  gpu::launch_encode(wire, x, message.data(), stream.get());
  const auto times = medians<3>(stream.get(), [&](size_t which) {
    if (which == 0) gpu::launch_encode(wire, x, message.data(), stream.get());
    if (which == 1) gpu::launch_decode(wire, message.data(), x, stream.get());
    if (which == 2) {
      check(cudaMemcpyAsync(to.data(), from.data(), copied, cudaMemcpyDeviceToDevice, stream.get()),
            "copy");
    }
  });
  fmt::print(
      "{{\"codec\":\"{}\",\"dtype\":\"{}\",\"elements\":{},\"wire_bytes\":{},\"time_us\":{{"
      "\"encode\":{:.1f},\"decode\":{:.1f},\"copy\":{:.1f}}},\"share_of_copy\":{{\"encode\":{:.3f},"
      "\"decode\":{:.3f}}},\"copy_GBps\":{:.0f},\"cpu_bytes\":{}}}\n",
      wire.describe(), name_of(dtype), elements, sent, times[0], times[1], times[2],
      times[2] / times[0], times[2] / times[1], double(2 * copied) / times[2] / 1000, right);
  std::fflush(stdout);
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  using namespace tandem;
  const int64_t elements = argc > 1 ? std::stoll(argv[1]) : int64_t(1) << 27;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const char* wire :
         {"int8", "int6", "int5", "int4", "int4:g32", "int3", "int2", "e4m3", "mxfp8", "mxfp4",
          "int8:asym", "int4:g32:hadamard", "int2:g64:spikes"}) {
      bench(Wire::parse(wire), dtype, elements);
    }
  }
}
