// Collectives over wire formats in random order: format, dtype and shape are drawn for each call
// (equal on all ranks), and each rank is delayed at random on the device and sometimes on the host.
// Ranks synchronize only after every fourth call, where all four outputs are compared, bit for bit,
// with those of CPU ranks on the same values, so bits are also equal across ranks.
// TANDEM_STRESS_CALLS sets the number of calls.
#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/device/signal_kernels.h"
#include "core/cuda/handles.h"
#include "tandem/collectives.h"
#include "tandem/communicator.h"
#include "tandem/random.h"
#include "tests/codec/bytes.h"
#include "tests/codec/values.h"
#include "tests/comm/cuda/digests.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

using namespace gpu;

enum class Op { all_reduce, reduce_scatter, all_gather, all_to_all };
constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"};

/// Collective over a whole tensor [rows, columns].
struct Case {
  Op op;
  const char* wire;
  DType dtype;
  int64_t rows, columns;

  std::string what() const {
    return fmt::format("{} {} {} {}x{}", kNames[int(op)], wire, name_of(dtype), rows, columns);
  }
  size_t bytes(int64_t count) const { return size_t(count * columns) * size_of(dtype); }
  /// Rows of this rank in the input and in the output of a call.
  int64_t rows_in(const Communicator& comm) const {
    return op == Op::all_gather ? shard(comm).count : rows;
  }
  int64_t rows_out(const Communicator& comm) const {
    if (op == Op::all_to_all) return shard(comm).count * comm.size();
    return op == Op::reduce_scatter ? shard(comm).count : rows;
  }
  Shard shard(const Communicator& comm) const { return shard_of(rows, comm.size(), comm.rank()); }
};

std::vector<Case> cases() {
  struct Format {
    const char* wire;
    DType dtype;
  };
  constexpr Format kSummed[] = {{"int8", DType::bf16},          {"int4:g32", DType::bf16},
                                {"int6", DType::bf16},          {"int5:asym", DType::f16},
                                {"e4m3:f32", DType::bf16},      {"mxfp4", DType::f32},
                                {"int4:hadamard", DType::bf16}, {"int2:g64:spikes", DType::f32}};
  constexpr Format kMoved[] = {{"lossless", DType::bf16}, {"lossless", DType::f32}};
  std::vector<Case> all;
  const auto add = [&](Op op, const Format& format) {
    for (int size = 0; size < 2; ++size) {
      const auto draw = philox(20, uint64_t(op), all.size());
      all.push_back(
          {op, format.wire, format.dtype, 1 + draw[0] % (size == 0 ? 40 : 300), 1 + draw[1] % 900});
    }
  };
  for (const Op op : {Op::all_reduce, Op::reduce_scatter, Op::all_gather, Op::all_to_all}) {
    for (const Format& format : kSummed) add(op, format);
    if (op != Op::all_gather && op != Op::all_to_all) continue;
    for (const Format& format : kMoved) add(op, format);
  }
  return all;
}

Bytes values_of(const Case& c, const Communicator& comm) {
  std::vector<float> values(size_t(c.rows_in(comm) * c.columns));
  for (size_t i = 0; i < values.size(); ++i) {
    const float x = uniform(uint64_t(700 + comm.rank()), int64_t(i));
    values[i] = i % 301 == 17 ? 50 * x : x;
  }
  return stored_as(c.dtype, values);
}

/// Runs `c` from `in` to `out`. An all-reduce is in place: `out` already has the values.
void call(Communicator& comm, const Case& c, const Tensor& in, const Tensor& out) {
  const Wire wire = Wire::parse(c.wire);
  switch (c.op) {
    case Op::all_reduce:
      return all_reduce(comm, out, wire);
    case Op::reduce_scatter:
      return reduce_scatter(comm, in, out, wire);
    case Op::all_gather:
      return all_gather(comm, in, out, wire);
    case Op::all_to_all: {
      std::vector<int64_t> send, recv(size_t(comm.size()), c.shard(comm).count);
      for (int r = 0; r < comm.size(); ++r) send.push_back(shard_of(c.rows, comm.size(), r).count);
      return all_to_all(comm, in, send, out, recv, wire);
    }
  }
}

/// Results of CPU ranks, by rank.
std::vector<Bytes> expected_of(const Case& c, int ranks) {
  std::vector<Bytes> all(static_cast<size_t>(ranks));
  WorldOptions options;
  options.ranks = ranks;
  run_threads(options, [&](Communicator& comm) {
    Bytes in = values_of(c, comm), out(c.bytes(c.rows_out(comm)));
    if (c.op == Op::all_reduce) out = in;
    call(comm, c, Tensor(in.data(), c.dtype, {c.rows_in(comm), c.columns}),
         Tensor(out.data(), c.dtype, {c.rows_out(comm), c.columns}));
    all[size_t(comm.rank())] = std::move(out);
  });
  return all;
}

/// Case on a GPU rank: its values, and the digest of the expected result.
struct StressCase {
  StressCase(GpuCommunicator& comm, const Case& given, const Bytes* expected)
      : c(given), memory(std::max<size_t>(c.bytes(c.rows_in(comm)), 16)) {
    in = memory.view(c.dtype, {c.rows_in(comm), c.columns});
    like = Tensor(nullptr, c.dtype, {c.rows_out(comm), c.columns}, in.device());
    if (const Bytes values = values_of(c, comm); !values.empty()) write(comm, in.data(), values);
    if (!expected || expected->empty()) return;
    const DeviceMemory right(expected->size());
    write(comm, right.data(), *expected);
    digest = gpu::digest(right.view(c.dtype, {c.rows_out(comm), c.columns}), comm.stream());
  }
  void run(GpuCommunicator& comm, const Tensor& out) const {
    if (c.op == Op::all_reduce) {
      check(cudaMemcpyAsync(out.data(), in.data(), in.bytes(), cudaMemcpyDefault, comm.stream()),
            "copy what is summed in place");
    }
    call(comm, c, in, out);
  }
  Case c;
  DeviceMemory memory;
  Tensor in, like;
  uint64_t digest = 0;
};

class EncodedStress : public OnGpus {};

TEST_P(EncodedStress, CallsAlternateUnderRandomDelays) {
  const char* text = std::getenv("TANDEM_STRESS_CALLS");
  const uint64_t calls = text ? std::strtoull(text, nullptr, 10) : 1000;
  const std::vector<Case> all = cases();
  std::vector<std::vector<Bytes>> expected;
  for (const Case& c : all) expected.push_back(expected_of(c, ranks()));
  run([&](GpuCommunicator& comm) {
    std::vector<std::unique_ptr<StressCase>> stress_cases;
    size_t max_bytes = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      stress_cases.push_back(
          std::make_unique<StressCase>(comm, all[i], &expected[i][size_t(comm.rank())]));
      max_bytes = std::max(max_bytes, stress_cases.back()->like.bytes());
    }
    constexpr size_t kInARow = 4;
    CallsInARow row(comm, kInARow, max_bytes);
    std::vector<const StressCase*> done;
    for (uint64_t n = 0; n < calls; ++n) {
      const StressCase& stress_case = *stress_cases[philox(21, 0, n)[0] % stress_cases.size()];
      const auto delay = philox(22, uint64_t(comm.rank()), n);
      if (delay[0] % 3 == 0) launch_pause(delay[1] % 20000, comm.stream());
      if (delay[2] % 97 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
      stress_case.run(comm, row.next(stress_case.like));
      done.push_back(&stress_case);
      if (!row.full() && n + 1 < calls) continue;
      const std::vector<uint64_t> found = row.digests();
      for (size_t i = 0; i < found.size(); ++i) {
        ASSERT_EQ(found[i], done[i]->digest) << "behind call " << n << ": " << done[i]->c.what();
      }
      row.begin_again();
      done.clear();
    }
  });
}

// Each collective, after others that all ranks completed.
TEST_P(EncodedStress, StoppedRankIsNamed) {
  for (const Case& c : {Case{Op::all_reduce, "int8", DType::bf16, 64, 1000},
                        Case{Op::reduce_scatter, "int4:g32", DType::bf16, 64, 1000},
                        Case{Op::all_gather, "int8", DType::bf16, 64, 1000},
                        Case{Op::all_gather, "lossless", DType::bf16, 64, 1000},
                        Case{Op::all_to_all, "int6", DType::bf16, 64, 1000},
                        Case{Op::all_to_all, "lossless", DType::f32, 64, 1000}}) {
    const auto error = timeout_without_last([&](GpuCommunicator& comm) {
      const auto stress_case = std::make_shared<StressCase>(comm, c, nullptr);
      const auto out =
          std::make_shared<DeviceMemory>(std::max<size_t>(stress_case->like.bytes(), 16));
      const Tensor result = out->view(c.dtype, {c.rows_out(comm), c.columns});
      for (int n = 0; n < 20; ++n) {
        if ((n + comm.rank()) % 3 == 0) launch_pause(20000, comm.stream());
        stress_case->run(comm, result);
      }
      comm.synchronize();
      return [&comm, stress_case, out, result] { stress_case->run(comm, result); };
    });
    EXPECT_EQ(error ? error->op : "", kNames[int(c.op)]) << c.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, EncodedStress, testing::Values(2, 3, 4, 8), gpus_name);

}  // namespace
}  // namespace tandem::test
