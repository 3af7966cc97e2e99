// Collectives over wire formats on GPU ranks give the results of CPU ranks, bit for bit.
#include <fmt/format.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "collectives/cuda/encoded_collectives.h"
#include "comm/device/signal_kernels.h"
#include "core/cuda/handles.h"
#include "tandem/collectives.h"
#include "tandem/communicator.h"
#include "tests/codec/bytes.h"
#include "tests/codec/values.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"

namespace tandem::test {
namespace {

using namespace gpu;

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

/// All-reduce results of the CPU ranks, equal on every rank, and their residuals.
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

TEST_P(EncodedSums, MatchCpuRanks) {
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
        EncodedCollectives sum(comm, Wire::parse(c.wire), c.dtype, c.elements);
        for (int call = 0; call < kCalls; ++call) {
          write(comm, memory.data(), stored_as(c.dtype, values_of(c, comm.rank(), call)));
          if ((call + comm.rank()) % 2 == 0) launch_pause(50000, comm.stream());
          // Both algorithms alternate on the same staging buffer.
          const EncodedSum algorithm = call == 1 ? EncodedSum::two_shot : EncodedSum::pipelined;
          sum.all_reduce(data, data, feedback ? &residual : nullptr, algorithm);
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
  const char* text = std::getenv("TANDEM_STRESS_CALLS");
  const uint64_t calls = text ? std::strtoull(text, nullptr, 10) : 200;
  constexpr int kGiven = 6;
  constexpr int64_t kMax = 200000;
  const char* wire = "int4:g32";
  std::vector<SumCase> cases;
  std::vector<Bytes> expected;
  for (int i = 0; i < kGiven; ++i) {
    cases.push_back(
        {wire, DType::bf16, i == 0 ? kMax : int64_t(philox(9, 1, uint64_t(i))[0] % kMax) + 1});
    expected.push_back(cpu_sums(cases.back(), ranks(), 1, false).sums[0]);
  }
  run([&](GpuCommunicator& comm) {
    EncodedCollectives sum(comm, Wire::parse(wire), DType::bf16, kMax);
    std::vector<DeviceMemory> ins, outs;
    for (const SumCase& c : cases) {
      ins.emplace_back(size_t(c.elements) * 2);
      outs.emplace_back(size_t(c.elements) * 2);
      write(comm, ins.back().data(), stored_as(c.dtype, values_of(c, comm.rank(), 0)));
    }
    const auto call = [&](size_t i) {
      const EncodedSum algorithm = i % 3 == 0 ? EncodedSum::two_shot : EncodedSum::pipelined;
      sum.all_reduce(ins[i].view(DType::bf16, {cases[i].elements}),
                     outs[i].view(DType::bf16, {cases[i].elements}), nullptr, algorithm);
    };
    const auto expect = [&](size_t i, const std::string& what) {
      ASSERT_EQ(difference(expected[i], read<std::byte>(comm, outs[i].data(), outs[i].bytes())), "")
          << what << ", rank " << comm.rank();
    };
    for (uint64_t n = 0; n < calls; ++n) {
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

TEST_P(EncodedSums, AbsentRankIsNamed) {
  if (ranks() == 1) GTEST_SKIP() << "one rank waits for nobody";
  struct Call {
    DeviceMemory memory{4096 * 2};
    EncodedCollectives sum;
    explicit Call(GpuCommunicator& comm) : sum(comm, Wire::parse("int8"), DType::bf16, 4096) {}
  };
  const auto error = timeout_without_last([](GpuCommunicator& comm) {
    const auto call = std::make_shared<Call>(comm);
    return [call] {
      const Tensor data = call->memory.view(DType::bf16, {4096});
      call->sum.all_reduce(data, data);
    };
  });
  EXPECT_EQ(error ? error->op : "", "all_reduce");
}

TEST_P(EncodedSums, CapturedCallsReplayAfterLargerCalls) {
  if (ranks() == 1) GTEST_SKIP() << "one rank encodes nothing";
  const SumCase small{"int8", DType::bf16, 5000}, large{"int8", DType::bf16, 3000000};
  const Bytes expected = cpu_sums(small, ranks(), 1, false).sums[0];
  run([&](GpuCommunicator& comm) {
    const Wire wire = Wire::parse(small.wire);
    const DeviceMemory memory(size_t(small.elements) * 2), larger(size_t(large.elements) * 2);
    const Tensor data = memory.view(small.dtype, {small.elements});
    const Bytes values = stored_as(small.dtype, values_of(small, comm.rank(), 0));
    const auto expect = [&](const char* what) {
      ASSERT_EQ(difference(expected, read<std::byte>(comm, memory.data(), memory.bytes())), "")
          << what << ", rank " << comm.rank();
    };
    write(comm, memory.data(), values);
    tandem::all_reduce(comm, data, wire);
    expect("before");
    const CapturedCalls graph(comm, [&] { tandem::all_reduce(comm, data, wire); });
    tandem::all_reduce(comm, larger.view(large.dtype, {large.elements}), wire);
    // Memory allocated in place of freed memory must not be zero.
    const DeviceMemory other(size_t(64) << 20);
    check(cudaMemsetAsync(other.data(), 0xff, other.bytes(), comm.stream()), "fill");
    for (int n = 0; n < 4; ++n) {
      write(comm, memory.data(), values);
      graph.launch();
      expect("replayed");
    }
  });
}

struct RowsCase {
  const char* wire;
  DType dtype;
  int64_t rows, row;
};

/// Row counts that no world size divides, and ranks without rows.
class EncodedRows : public OnGpus {
 protected:
  static std::vector<RowsCase> cases() {
    return {{"int8", DType::bf16, 1111, 96},       {"int4:g32", DType::f32, 64, 1024},
            {"int5:asym", DType::f16, 3, 700},     {"mxfp4", DType::bf16, 4096, 33},
            {"int2:g64:spikes", DType::f32, 7, 1}, {"int3:hadamard", DType::bf16, 513, 128}};
  }
  static SumCase whole(const RowsCase& c) { return {c.wire, c.dtype, c.rows * c.row}; }
  static Shard shard_of_case(const RowsCase& c, const Communicator& comm) {
    const Shard rows = shard_of(c.rows, comm.size(), comm.rank());
    return {rows.begin * c.row, rows.count * c.row};
  }
  static Tensor host(Bytes& bytes, const RowsCase& c) {
    return Tensor(bytes.data(), c.dtype, {int64_t(bytes.size() / size_of(c.dtype)) / c.row, c.row});
  }
};

TEST_P(EncodedRows, ReduceScatterMatchesCpuRanks) {
  if (ranks() == 1) GTEST_SKIP() << "one rank encodes nothing";
  for (const RowsCase& c : cases()) {
    for (const bool feedback : {false, true}) {
      const auto count = size_t(ranks());
      std::vector<Bytes> expected(count);
      std::vector<std::vector<float>> residuals(count);
      WorldOptions options;
      options.ranks = ranks();
      run_threads(options, [&](Communicator& comm) {
        const auto r = size_t(comm.rank());
        expected[r].resize(size_t(shard_of_case(c, comm).count) * size_of(c.dtype));
        residuals[r].resize(size_t(c.rows * c.row));
        const Tensor residual(residuals[r].data(), DType::f32, {c.rows, c.row});
        for (int call = 0; call < 2; ++call) {
          Bytes data = stored_as(c.dtype, values_of(whole(c), comm.rank(), call));
          tandem::reduce_scatter(comm, host(data, c), host(expected[r], c), Wire::parse(c.wire),
                                 feedback ? &residual : nullptr);
        }
      });
      run([&](GpuCommunicator& comm) {
        const auto r = size_t(comm.rank());
        const Shard local = shard_of_case(c, comm);
        const DeviceMemory memory(size_t(c.rows * c.row) * size_of(c.dtype)),
            shard(std::max<size_t>(expected[r].size(), 16)), lost(size_t(c.rows * c.row) * 4);
        check(cudaMemsetAsync(lost.data(), 0, lost.bytes(), comm.stream()), "clear the residual");
        const Tensor residual = lost.view(DType::f32, {c.rows, c.row});
        for (int call = 0; call < 2; ++call) {
          write(comm, memory.data(), stored_as(c.dtype, values_of(whole(c), comm.rank(), call)));
          if ((call + comm.rank()) % 2 == 0) launch_pause(50000, comm.stream());
          tandem::reduce_scatter(comm, memory.view(c.dtype, {c.rows, c.row}),
                                 shard.view(c.dtype, {local.count / c.row, c.row}),
                                 Wire::parse(c.wire), feedback ? &residual : nullptr);
        }
        EXPECT_EQ(difference(expected[r], read<std::byte>(comm, shard.data(), expected[r].size())),
                  "")
            << c.wire << ", rank " << r;
        if (!feedback) return;
        EXPECT_EQ(read<float>(comm, lost.data(), residuals[r].size()), residuals[r])
            << c.wire << ", the residual of rank " << r;
      });
    }
  }
}

TEST_P(EncodedRows, AllGatherMatchesCpuRanksAlsoInAGraph) {
  if (ranks() == 1) GTEST_SKIP() << "one rank encodes nothing";
  for (const RowsCase& c : cases()) {
    Bytes expected(size_t(c.rows * c.row) * size_of(c.dtype));
    WorldOptions options;
    options.ranks = ranks();
    const auto shard_values = [&](const Communicator& comm) {
      const Shard local = shard_of_case(c, comm);
      const Bytes all = stored_as(c.dtype, values_of(whole(c), 0, 0));
      const auto size = std::ptrdiff_t(size_of(c.dtype));
      return Bytes(all.begin() + local.begin * size,
                   all.begin() + (local.begin + local.count) * size);
    };
    run_threads(options, [&](Communicator& comm) {
      Bytes shard = shard_values(comm), out(expected.size());
      tandem::all_gather(comm, host(shard, c), host(out, c), Wire::parse(c.wire));
      if (comm.rank() == 0) expected = out;
    });
    run([&](GpuCommunicator& comm) {
      const Shard local = shard_of_case(c, comm);
      const Bytes values = shard_values(comm);
      const DeviceMemory memory(expected.size());
      const Tensor out = memory.view(c.dtype, {c.rows, c.row});
      // In place: the shard is a view of the output.
      const Tensor shard = out.rows(local.begin / c.row, local.count / c.row);
      const auto call = [&] { tandem::all_gather(comm, shard, out, Wire::parse(c.wire)); };
      const auto fill = [&] {
        check(cudaMemsetAsync(memory.data(), 0xff, memory.bytes(), comm.stream()), "poison");
        if (!values.empty()) write(comm, static_cast<std::byte*>(shard.data()), values);
      };
      const auto expect = [&](const char* what) {
        ASSERT_EQ(difference(expected, read<std::byte>(comm, memory.data(), memory.bytes())), "")
            << c.wire << ", " << what << ", rank " << comm.rank();
      };
      fill(), call(), expect("called");
      const CapturedCalls graph(comm, call);
      for (int n = 0; n < 3; ++n) fill(), graph.launch();
      expect("replayed");
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, EncodedRows, testing::Values(2, 3, 4, 8), gpus_name);
INSTANTIATE_TEST_SUITE_P(Gpu, EncodedSums, testing::Values(2, 3, 4, 8), gpus_name);

}  // namespace
}  // namespace tandem::test
