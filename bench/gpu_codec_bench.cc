// gpu_codec_bench [ELEMENTS]: encodes, decodes and reduces on one GPU, compared with plain copies
// of the same number of bytes. Checks the bytes against the CPU's in the same run. Prints one JSON
// object per line.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
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
constexpr int64_t kChecked = 1 << 20, kGenerated = 1 << 22;
constexpr int kRanks = 4, kLocalRank = 1;  // ranks and local rank of the sum

/// gpu::Event does not record times.
struct TimedEvent {
  cudaEvent_t event = nullptr;
  TimedEvent() { check(cudaEventCreate(&event), "make an event"); }
  ~TimedEvent() { cudaEventDestroy(event); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;
  cudaEvent_t get() const { return event; }
};

struct Times {
  double median, minimum, maximum;
};

/// Times in microseconds; candidates alternate.
template <size_t kCount, typename Run>
std::array<Times, kCount> measure(cudaStream_t stream, const Run& run) {
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
  std::array<Times, kCount> result;
  for (size_t which = 0; which < kCount; ++which) {
    std::ranges::sort(times[which]);
    result[which] = {times[which][kRepeats / 2], times[which].front(), times[which].back()};
  }
  return result;
}

std::vector<std::byte> read(const std::byte* device, size_t bytes, cudaStream_t stream) {
  std::vector<std::byte> host(bytes);
  check(cudaMemcpyAsync(host.data(), device, bytes, cudaMemcpyDeviceToHost, stream), "read");
  check(cudaStreamSynchronize(stream), "read");
  return host;
}

/// Fills with normally distributed values on the GPU, by repeating a generated block.
void fill(const Tensor& values, cudaStream_t stream) {
  const size_t size = size_of(values.dtype()), bytes = size_t(values.elements()) * size;
  std::vector<std::byte> host(std::min(bytes, size_t(kGenerated) * size));
  for (size_t i = 0; i * size < host.size(); ++i) {
    const float x = normal(1, 2, i);
    const uint16_t half = BFloat16::from_float(x).bits;
    std::memcpy(host.data() + i * size, size == 2 ? static_cast<const void*>(&half) : &x, size);
  }
  auto* const to = static_cast<std::byte*>(values.data());
  check(cudaMemcpyAsync(to, host.data(), host.size(), cudaMemcpyHostToDevice, stream), "write");
  for (size_t done = host.size(); done < bytes; done += host.size()) {
    check(cudaMemcpyAsync(to + done, to, std::min(host.size(), bytes - done),
                          cudaMemcpyDeviceToDevice, stream),
          "repeat");
  }
  check(cudaStreamSynchronize(stream), "write");
}

/// Device memory of a case's kernels.
struct Memory {
  DeviceMemory values, out, message, messages;
  size_t sent;

  Memory(const Wire& wire, DType dtype, int64_t elements)
      : values(size_t(elements) * size_of(dtype)),
        out(values.bytes()),
        message(wire.bytes(elements, dtype)),
        messages(kRanks * stride(wire, dtype, elements)),
        sent(message.bytes()) {}
  static size_t stride(const Wire& wire, DType dtype, int64_t elements) {
    return (wire.bytes(elements, dtype) + 255) / 256 * 256;
  }
};

/// Compares encoding, decoding, and a sum with encoded values of other shards.
bool has_the_cpus_bytes(const Wire& wire, const Tensor& x, Memory& memory, cudaStream_t stream) {
  const DType dtype = x.dtype();
  const int64_t count = std::min(kChecked, x.elements() / kRanks);
  const size_t bytes = size_t(count) * size_of(dtype), sent = wire.bytes(count, dtype);
  const size_t stride = Memory::stride(wire, dtype, count);
  const auto values_of = [&](int r) {
    return Tensor(static_cast<std::byte*>(x.data()) + size_t(r) * bytes, dtype, {count},
                  x.device());
  };
  const auto device = [&](const DeviceMemory& m, DType type) { return m.view(type, {count}); };
  const auto numbers = size_t(count);
  std::vector<float> sum(numbers, -0.0f), one(numbers);
  bool right = true;
  for (int r = 0; r < kRanks; ++r) {
    auto values = read(static_cast<std::byte*>(values_of(r).data()), bytes, stream);
    std::vector<std::byte> expected(sent), decoded(bytes);
    encode(wire, Tensor(values.data(), dtype, {count}), expected);
    decode(wire, expected, Tensor(decoded.data(), dtype, {count}));
    std::byte* const message = memory.messages.data() + size_t(r) * stride;
    gpu::launch_encode(wire, values_of(r), message, stream);
    gpu::launch_decode(wire, message, device(memory.out, dtype), stream);
    right = right && read(message, sent, stream) == expected &&
            read(memory.out.data(), bytes, stream) == decoded;
    decode(wire, expected, Tensor(one.data(), DType::f32, {count}));
    for (size_t i = 0; i < one.size(); ++i) {
      if (r == kLocalRank && dtype == DType::bf16) {
        uint16_t bits;
        std::memcpy(&bits, &values[2 * i], 2);
        one[i] = BFloat16{bits}.to_float();
      } else if (r == kLocalRank) {
        std::memcpy(&one[i], &values[4 * i], 4);
      }
      sum[i] += one[i];
    }
  }
  std::vector<std::byte> expected(sent), decoded(bytes);
  encode(wire, Tensor(sum.data(), DType::f32, {count}), expected);
  decode(wire, expected, Tensor(decoded.data(), dtype, {count}));
  gpu::launch_sum(wire, memory.messages.data(), stride, kRanks, kLocalRank, values_of(kLocalRank),
                  memory.message.data(), device(memory.out, dtype), stream);
  return right && read(memory.message.data(), sent, stream) == expected &&
         read(memory.out.data(), bytes, stream) == decoded;
}

/// Times encoding, decoding, and the work of a shard's owner on kRanks ranks: decodes the others'
/// messages, adds them to its own values, encodes the sum, and stores it as decoded.
void bench(const Wire& wire, DType dtype, int64_t elements) {
  const gpu::Stream stream;
  Memory memory(wire, dtype, elements);
  const size_t bytes = memory.values.bytes(), sent = memory.sent;
  const size_t stride = Memory::stride(wire, dtype, elements);
  const size_t moved[] = {bytes + sent, bytes + sent, 2 * bytes + kRanks * sent};
  const DeviceMemory from(moved[2] / 2), to(moved[2] / 2);
  const Tensor x = memory.values.view(dtype, {elements}), out = memory.out.view(dtype, {elements});
  fill(x, stream.get());
  const bool right = has_the_cpus_bytes(wire, x, memory, stream.get());
  for (int r = 0; r < kRanks; ++r) {
    gpu::launch_encode(wire, x, memory.messages.data() + size_t(r) * stride, stream.get());
  }
  gpu::launch_encode(wire, x, memory.message.data(), stream.get());
  const auto times = measure<6>(stream.get(), [&](size_t which) {
    switch (which) {
      case 0:
        return gpu::launch_encode(wire, x, memory.message.data(), stream.get());
      case 1:
        return gpu::launch_decode(wire, memory.message.data(), out, stream.get());
      case 2:
        return gpu::launch_sum(wire, memory.messages.data(), stride, kRanks, kLocalRank, x,
                               memory.message.data(), out, stream.get());
      default:  // read and written
        check(cudaMemcpyAsync(to.data(), from.data(), moved[which - 3] / 2 / 256 * 256,
                              cudaMemcpyDeviceToDevice, stream.get()),
              "copy");
    }
  });
  const char* const names[] = {"encode", "decode", "sum"};
  std::string us, spread, share;
  for (size_t i = 0; i < 6; ++i) {
    const std::string name = std::string(i < 3 ? "" : "copy_") + names[i % 3];
    us += fmt::format("{}\"{}\":{:.1f}", i ? "," : "", name, times[i].median);
    spread += fmt::format("{}\"{}\":[{:.1f},{:.1f}]", i ? "," : "", name, times[i].minimum,
                          times[i].maximum);
    if (i >= 3) continue;
    share +=
        fmt::format("{}\"{}\":{:.3f}", i ? "," : "", name, times[i + 3].median / times[i].median);
  }
  fmt::print(
      "{{\"codec\":\"{}\",\"dtype\":\"{}\",\"elements\":{},\"ranks\":{},\"wire_bytes\":{},"
      "\"time_us\":{{{}}},\"spread_us\":{{{}}},\"share_of_copy\":{{{}}},\"copy_GBps\":{:.0f},"
      "\"cpu_bytes\":{}}}\n",
      wire.describe(), name_of(dtype), elements, kRanks, sent, us, spread, share,
      double(moved[0]) / times[3].median / 1000, right);
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
          "mxfp6", "int8:asym", "int4:g32:hadamard", "int2:g64:spikes"}) {
      bench(Wire::parse(wire), dtype, elements);
    }
  }
}
