// Wire formats on the GPU: the CPU's bytes and values, and sums over them that are the CPU ranks'.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "codec/cuda/encode.h"
#include "collectives/cuda/encoded_all_reduce.h"
#include "comm/device/signal_kernels.h"
#include "core/cuda/handles.h"
#include "tandem/collectives.h"
#include "tandem/communicator.h"
#include "tests/codec/values.h"
#include "tests/gpu/captured_calls.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/gpu/host_copies.h"

namespace tandem::test {
namespace {

using namespace gpu;
using Bytes = std::vector<std::byte>;

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

Bytes stored_as(DType dtype, const std::vector<float>& values) {
  Bytes all(values.size() * size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const float bounded =
        dtype == DType::f16 ? std::clamp(values[i], -65504.0f, 65504.0f) : values[i];
    if (dtype == DType::f32) {
      std::memcpy(&all[4 * i], &bounded, 4);
    } else {
      const uint16_t bits = dtype == DType::bf16 ? BFloat16::from_float(bounded).bits
                                                 : Float16::from_float(bounded).bits;
      std::memcpy(&all[2 * i], &bits, 2);
    }
  }
  return all;
}

Tensor host_tensor(Bytes& bytes, DType dtype) {
  return Tensor(bytes.data(), dtype, {int64_t(bytes.size() / size_of(dtype))});
}

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

/// Where they first differ, or nothing.
std::string difference(const Bytes& expected, const Bytes& found) {
  const auto at = std::mismatch(expected.begin(), expected.end(), found.begin(), found.end());
  if (at.first == expected.end() && at.second == found.end()) return "";
  return fmt::format("byte {} of {}", at.first - expected.begin(), expected.size());
}

std::vector<Input> inputs(int64_t count) {
  std::vector<Input> all = finite_inputs(count);
  Input not_finite{"not finite", std::vector<float>(size_t(count), 1.0f)};
  for (size_t i = 0; i < not_finite.values.size(); i += 97) {
    not_finite.values[i] =
        i % 2 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  }
  all.push_back(not_finite);
  return all;
}

class GpuCodecs : public testing::TestWithParam<std::string> {};

TEST_P(GpuCodecs, GiveTheCpusBytesAndValues) {
  if (gpu_count() == 0) GTEST_SKIP() << "needs a GPU";
  const Wire wire = Wire::parse(GetParam());
  const Stream stream;
  constexpr int64_t kMost = 5000;
  const DeviceMemory device(kMost * 4 + 64), message_memory(kMost * 8 + 4096);
  for (const DType dtype : kDTypes) {
    for (const int64_t count : {1, 5, 127, 128, 129, 1000, 2049, 5000}) {
      for (const Input& input : inputs(count)) {
        Bytes values = stored_as(dtype, input.values);
        Bytes expected(wire.bytes(count, dtype), std::byte{0xa5});
        encode(wire, host_tensor(values, dtype), expected);
        Bytes decoded(values.size());
        decode(wire, expected, host_tensor(decoded, dtype));
        for (const size_t skip : {size_t(0), size_of(dtype)}) {  // aligned and not
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

std::string wire_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Gpu, GpuCodecs, testing::ValuesIn(all_wires()), wire_name);

TEST(GpuCodec, RefusesWhatGpusDoNotHave) {
  if (gpu_count() == 0) GTEST_SKIP() << "needs a GPU";
  const DeviceMemory memory(256);
  const Tensor x(memory.data(), DType::bf16, {64}, Device{DeviceKind::cuda, 0});
  EXPECT_THROW(launch_encode(Wire::parse("lossless"), x, memory.data(), nullptr), Unsupported);
  EXPECT_THROW(launch_encode(Wire::parse("int8"), x, memory.data() + 8, nullptr), InvalidArgument);
}

class EncodedSums : public OnGpus {};

struct SumCase {
  std::string wire;
  DType dtype;
  int64_t elements;
};

std::vector<float> values_of(const SumCase& c, int rank, int call) {
  std::vector<float> values(size_t(c.elements));
  for (int64_t i = 0; i < c.elements; ++i) {
    const float x = uniform(uint64_t(1000 + 16 * call + rank), i);
    values[size_t(i)] = i % 301 == 17 ? 50 * x : x;
  }
  return values;
}

/// What the CPU ranks' all-reduce makes of it, on every rank the same; and their residuals.
struct CpuSums {
  std::vector<Bytes> sums;
  std::vector<std::vector<float>> residuals;
};
CpuSums cpu_sums(const SumCase& c, int ranks, int calls, bool feedback) {
  CpuSums all;
  all.sums.resize(size_t(calls));
  all.residuals.assign(size_t(ranks), std::vector<float>(size_t(c.elements)));
  WorldOptions options;
  options.ranks = ranks;
  run_threads(options, [&](Communicator& comm) {
    const Tensor residual(all.residuals[size_t(comm.rank())].data(), DType::f32, {c.elements});
    for (int call = 0; call < calls; ++call) {
      Bytes data = stored_as(c.dtype, values_of(c, comm.rank(), call));
      all_reduce(comm, host_tensor(data, c.dtype), Wire::parse(c.wire),
                 feedback ? &residual : nullptr);
      if (comm.rank() == 0) all.sums[size_t(call)] = data;
    }
  });
  return all;
}

TEST_P(EncodedSums, AreTheCpuRanks) {
  if (ranks() == 1) GTEST_SKIP() << "one rank encodes nothing";
  constexpr int kCalls = 3;
  for (const SumCase& c : {SumCase{"int8", DType::bf16, 100003},
                           {"int8", DType::f32, 384 * 1024},
                           {"int4:g32", DType::bf16, 65536},
                           {"int5:asym", DType::f16, 40000},
                           {"int6:log2", DType::f32, 999},
                           {"int2:g64:asym:spikes", DType::f32, 7777},
                           {"int4:hadamard", DType::bf16, 33000},
                           {"mxfp4", DType::f32, 8},
                           {"e4m3:f32", DType::bf16, 131072}}) {
    for (const bool feedback : {false, true}) {
      const std::string what = fmt::format("{} {} {}{}", c.wire, name_of(c.dtype), c.elements,
                                           feedback ? " with error feedback" : "");
      const CpuSums expected = cpu_sums(c, ranks(), kCalls, feedback);
      run([&](GpuCommunicator& comm) {
        const size_t bytes = size_t(c.elements) * size_of(c.dtype);
        const DeviceMemory memory(bytes), residual_memory(size_t(c.elements) * 4);
        check(cudaMemsetAsync(residual_memory.data(), 0, residual_memory.bytes(), comm.stream()),
              "clear the residual");
        const Tensor data = memory.view(c.dtype, {c.elements});
        const Tensor residual = residual_memory.view(DType::f32, {c.elements});
        EncodedAllReduce sum(comm, Wire::parse(c.wire), c.dtype, c.elements);
        for (int call = 0; call < kCalls; ++call) {
          write(comm, memory.data(), stored_as(c.dtype, values_of(c, comm.rank(), call)));
          if ((call + comm.rank()) % 2 == 0) launch_pause(50000, comm.stream());
          sum.run(data, data, feedback ? &residual : nullptr);
          const auto found = read<std::byte>(comm, memory.data(), bytes);
          EXPECT_EQ(difference(expected.sums[size_t(call)], found), "")
              << what << ", call " << call << ", rank " << comm.rank();
        }
        if (!feedback) return;
        EXPECT_EQ(read<float>(comm, residual_memory.data(), size_t(c.elements)),
                  expected.residuals[size_t(comm.rank())])
            << what << ", the residual of rank " << comm.rank();
      });
    }
  }
}

TEST_P(EncodedSums, SizesAlternateUnderRandomDelaysAndInAGraph) {
  if (ranks() == 1) GTEST_SKIP() << "one rank encodes nothing";
  constexpr int kGiven = 6;
  constexpr int64_t kMost = 200000;
  const char* wire = "int4:g32";
  std::vector<SumCase> cases;
  std::vector<Bytes> expected;
  for (int i = 0; i < kGiven; ++i) {
    cases.push_back(
        {wire, DType::bf16, i == 0 ? kMost : int64_t(philox(9, 1, uint64_t(i))[0] % kMost) + 1});
    expected.push_back(cpu_sums(cases.back(), ranks(), 1, false).sums[0]);
  }
  run([&](GpuCommunicator& comm) {
    EncodedAllReduce sum(comm, Wire::parse(wire), DType::bf16, kMost);
    std::vector<DeviceMemory> ins, outs;
    for (const SumCase& c : cases) {
      ins.emplace_back(size_t(c.elements) * 2);
      outs.emplace_back(size_t(c.elements) * 2);
      write(comm, ins.back().data(), stored_as(c.dtype, values_of(c, comm.rank(), 0)));
    }
    const auto call = [&](size_t i) {
      sum.run(ins[i].view(DType::bf16, {cases[i].elements}),
              outs[i].view(DType::bf16, {cases[i].elements}));
    };
    const auto expect = [&](size_t i, const std::string& what) {
      ASSERT_EQ(difference(expected[i], read<std::byte>(comm, outs[i].data(), outs[i].bytes())), "")
          << what << ", rank " << comm.rank();
    };
    for (uint64_t n = 0; n < 200; ++n) {
      const size_t i = philox(5, 0, n)[0] % kGiven;
      const uint32_t delay = philox(6, uint64_t(comm.rank()), n)[0] % 90000;
      if (delay < 30000) launch_pause(delay, comm.stream());
      check(cudaMemsetAsync(outs[i].data(), 0xff, outs[i].bytes(), comm.stream()), "poison");
      call(i);
      if (n % 10 == 9) expect(i, fmt::format("call {}", n));
    }
    const CapturedCalls graph(comm, [&] {
      for (size_t i = 0; i < kGiven; ++i) call(i);
    });
    for (int n = 0; n < 20; ++n) {
      for (const DeviceMemory& out : outs) {
        check(cudaMemsetAsync(out.data(), 0xff, out.bytes(), comm.stream()), "poison");
      }
      if ((n + comm.rank()) % 3 == 0) launch_pause(40000, comm.stream());
      graph.launch();
    }
    for (size_t i = 0; i < kGiven; ++i) expect(i, "replayed");
  });
}

TEST_P(EncodedSums, NameTheRankThatNeverComes) {
  if (ranks() == 1) GTEST_SKIP() << "one rank waits for nobody";
  struct Call {
    DeviceMemory memory{4096 * 2};
    EncodedAllReduce sum;
    explicit Call(GpuCommunicator& comm) : sum(comm, Wire::parse("int8"), DType::bf16, 4096) {}
  };
  const auto error = timeout_without_last([](GpuCommunicator& comm) {
    const auto call = std::make_shared<Call>(comm);
    return [call] {
      const Tensor data = call->memory.view(DType::bf16, {4096});
      call->sum.run(data, data);
    };
  });
  EXPECT_EQ(error ? error->op : "", "all_reduce");
}

INSTANTIATE_TEST_SUITE_P(Gpu, EncodedSums, testing::Values(2, 3, 4, 8), gpus_name);

}  // namespace
}  // namespace tandem::test
