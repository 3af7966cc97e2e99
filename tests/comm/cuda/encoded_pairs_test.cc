// All-to-all over wire formats on GPU ranks gives the results of CPU ranks, bit for bit.
#include <algorithm>
#include <string>
#include <vector>

#include "comm/device/signal_kernels.h"
#include "core/cuda/handles.h"
#include "tandem/collectives.h"
#include "tandem/communicator.h"
#include "tandem/random.h"
#include "tests/codec/bytes.h"
#include "tests/codec/values.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"

namespace tandem::test {
namespace {

using namespace gpu;

struct PairsCase {
  const char* wire;
  DType dtype;
  int64_t row;
  bool equal;  // equal splits
  int64_t rows;
};

/// Number of rows from rank `from` to rank `to`; 0 for some pairs.
int64_t rows_of(const PairsCase& c, int from, int to) {
  return c.equal ? c.rows : (c.rows * (from + 2 * to)) % 7 * c.rows / 5;
}
std::vector<int64_t> counts_of(const PairsCase& c, const Communicator& comm, bool sends) {
  std::vector<int64_t> counts;
  for (int r = 0; r < comm.size(); ++r) {
    counts.push_back(sends ? rows_of(c, comm.rank(), r) : rows_of(c, r, comm.rank()));
  }
  return counts;
}
int64_t sum_of(const std::vector<int64_t>& counts) {
  int64_t sum = 0;
  for (const int64_t count : counts) sum += count;
  return sum;
}
Bytes values_of(const PairsCase& c, int64_t rows, int rank) {
  std::vector<float> values(size_t(rows * c.row));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = uniform(uint64_t(3000 + rank), int64_t(i)) * (i % 301 == 17 ? 50.0f : 1.0f);
  }
  return stored_as(c.dtype, values);
}

class EncodedPairs : public OnGpus {};

TEST_P(EncodedPairs, MatchCpuRanksAlsoInAGraph) {
  if (ranks() == 1) GTEST_SKIP() << "one rank encodes nothing";
  for (const PairsCase& c : {PairsCase{"int8", DType::bf16, 96, true, 700},
                             {"int4:g32", DType::f32, 33, false, 111},
                             {"int5:asym", DType::f16, 7, false, 3},
                             {"int8:g16:asym:f32", DType::bf16, 1024, true, 80},
                             {"int2:g64:spikes", DType::f32, 1, false, 50000},
                             {"int4:hadamard", DType::bf16, 128, true, 1},
                             {"int6", DType::bf16, 1024, true, 2000},
                             {"lossless", DType::bf16, 1000, false, 100},
                             {"lossless", DType::f32, 1001, false, 50},
                             {"lossless", DType::bf16, 1024, true, 2000}}) {
    const Wire wire = Wire::parse(c.wire);
    std::vector<Bytes> expected(static_cast<size_t>(ranks()));
    WorldOptions options;
    options.ranks = ranks();
    run_threads(options, [&](Communicator& comm) {
      const auto send = counts_of(c, comm, true), recv = counts_of(c, comm, false);
      Bytes from = values_of(c, sum_of(send), comm.rank());
      Bytes& to = expected[size_t(comm.rank())];
      to.resize(size_t(sum_of(recv) * c.row) * size_of(c.dtype));
      all_to_all(comm, Tensor(from.data(), c.dtype, {sum_of(send), c.row}), send,
                 Tensor(to.data(), c.dtype, {sum_of(recv), c.row}), recv, wire);
    });
    run([&](GpuCommunicator& comm) {
      const auto send = counts_of(c, comm, true), recv = counts_of(c, comm, false);
      const Bytes values = values_of(c, sum_of(send), comm.rank());
      const Bytes& right = expected[size_t(comm.rank())];
      const DeviceMemory from(std::max<size_t>(values.size(), 16)),
          to(std::max<size_t>(right.size(), 16));
      if (!values.empty()) write(comm, from.data(), values);
      const auto call = [&] {
        all_to_all(comm, from.view(c.dtype, {sum_of(send), c.row}), send,
                   to.view(c.dtype, {sum_of(recv), c.row}), recv, wire);
      };
      const auto expect = [&](const char* what) {
        EXPECT_EQ(difference(right, read<std::byte>(comm, to.data(), right.size())), "")
            << c.wire << ", " << what << ", rank " << comm.rank();
      };
      const auto poison = [&] {
        check(cudaMemsetAsync(to.data(), 0xff, to.bytes(), comm.stream()), "poison");
      };
      for (int n = 0; n < 3; ++n) {
        poison();
        if ((n + comm.rank()) % 2 == 0) launch_pause(50000, comm.stream());
        call();
      }
      expect("called");
      const CapturedCalls graph(comm, call);
      for (int n = 0; n < 3; ++n) poison(), graph.launch();
      expect("replayed");
    });
  }
}

TEST_P(EncodedPairs, LosslessGatherIsExact) {
  if (ranks() == 1) GTEST_SKIP() << "one rank encodes nothing";
  const Wire wire = Wire::parse("lossless");
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const bool any_bits : {false, true}) {  // incompressible, so sent uncompressed
      run([&](GpuCommunicator& comm) {
        const int64_t rows = 41 * comm.size() + 1, columns = 1003;
        Bytes all(size_t(rows * columns) * size_of(dtype));
        if (any_bits) {
          for (size_t i = 0; i < all.size(); ++i) all[i] = std::byte(philox(4, 4, i)[0]);
        } else {
          all = values_of({"", dtype, columns, true, 0}, rows, 0);
        }
        const DeviceMemory memory(all.size());
        const Tensor out = memory.view(dtype, {rows, columns});
        const Shard local = shard_of(rows, comm.size(), comm.rank());
        const Tensor shard = out.rows(local.begin, local.count);
        const size_t row = size_t(columns) * size_of(dtype);
        for (int n = 0; n < 3; ++n) {
          check(cudaMemsetAsync(memory.data(), 0xff, memory.bytes(), comm.stream()), "poison");
          const auto* local_rows = all.data() + size_t(local.begin) * row;
          write(comm, static_cast<std::byte*>(shard.data()),
                Bytes(local_rows, local_rows + shard.bytes()));
          all_gather(comm, shard, out, wire);
          EXPECT_EQ(difference(all, read<std::byte>(comm, memory.data(), all.size())), "")
              << name_of(dtype) << (any_bits ? ", any bits" : "") << ", rank " << comm.rank();
        }
      });
    }
  }
}

TEST_P(EncodedPairs, AbsentRankIsNamed) {
  if (ranks() == 1) GTEST_SKIP() << "one rank waits for nobody";
  const auto error = timeout_without_last([](GpuCommunicator& comm) {
    const auto memory = std::make_shared<DeviceMemory>(size_t(2 * 8 * 4096 * comm.size()));
    const std::vector<int64_t> each(size_t(comm.size()), 8);
    const auto half = int64_t(8 * comm.size());
    const Tensor both = memory->view(DType::bf16, {2 * half, 1024});
    const auto call = [=, &comm] {
      all_to_all(comm, both.rows(0, half), each, both.rows(half, half), each, Wire::parse("int8"));
    };
    call();  // allocates
    comm.synchronize();
    return [call, memory] { call(); };
  });
  EXPECT_EQ(error ? error->op : "", "all_to_all");
}

INSTANTIATE_TEST_SUITE_P(Gpu, EncodedPairs, testing::Values(2, 3, 4, 8), gpus_name);

}  // namespace
}  // namespace tandem::test
