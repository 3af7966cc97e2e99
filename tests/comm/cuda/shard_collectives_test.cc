// All-gather, reduce-scatter and all-reduce by kernels: exact for any size and offset, in any
// order.
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "bench/cuda/verify.h"
#include "collectives/cuda/shard_exchange.h"
#include "comm/device/signal_kernels.h"
#include "tandem/collectives.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"
#include "tests/overlap/cuda/matrix.h"

namespace tandem::test {
namespace {

using namespace gpu;

class ShardCollectives : public OnGpus {};
class LostShardCollectives : public OnGpus {};

// Views that begin `skip` elements into their memory, so that shards begin anywhere.
Tensor view_from(const DeviceMemory& memory, int64_t skip, DType dtype, int64_t rows,
                 int64_t columns) {
  const Tensor all = memory.view(DType::u8, {int64_t(memory.bytes())});
  return Tensor(static_cast<std::byte*>(all.data()) + size_t(skip) * size_of(dtype), dtype,
                {rows, columns}, all.device());
}

// Fills shard p of rank r's input.
void fill_shard(const GpuCommunicator& comm, const Tensor& shard_in, int p, int r) {
  if (shard_in.elements() > 0)
    fill_uniform(shard_in, 3 + uint64_t(p), 10 + uint64_t(r), 0, comm.stream());
}

// One call of each kind, by the given algorithm or, if none, as the collectives choose.
void expect_exact_shards(GpuCommunicator& comm, DType dtype, int64_t rows, int64_t columns,
                         int64_t skip, std::optional<ShardAlgorithm> algorithm) {
  const int world = comm.size(), rank = comm.rank();
  const std::string what = fmt::format("{} {}x{} from {} {}", name_of(dtype), rows, columns, skip,
                                       algorithm ? gpu::name_of(*algorithm) : "uncompressed");
  const size_t bytes = size_t(rows * columns + skip) * size_of(dtype);
  const DeviceMemory whole_memory(bytes), expected_memory(bytes), shard_memory(bytes);
  const Tensor whole = view_from(whole_memory, skip, dtype, rows, columns),
               expected = view_from(expected_memory, 0, dtype, rows, columns);
  const auto shard_in = [&](const Tensor& of, int p) {
    const Shard local = shard_of(rows, world, p);
    return of.rows(local.begin, local.count);
  };
  const Tensor shard =
      view_from(shard_memory, skip / 2, dtype, shard_in(whole, rank).dim(0), columns);
  if (algorithm && (world == 1 || !shard_exchange(comm).fits(whole, *algorithm))) return;

  for (int p = 0; p < world; ++p) fill_shard(comm, shard_in(expected, p), p, p);
  const uint64_t gathered = digest(expected, comm.stream());
  for (const Tensor& from : {shard, shard_in(whole, rank)}) {
    poison(whole, comm.stream());
    fill_shard(comm, from, rank, rank);
    algorithm ? shard_exchange(comm).all_gather(from, whole, *algorithm)
              : all_gather(comm, from, whole);
    EXPECT_EQ(digest(whole, comm.stream()), gathered) << what;
  }
  if (dtype == DType::e4m3) return;
  for (const Tensor& to : {shard, shard_in(whole, rank)}) {
    poison(shard, comm.stream());
    for (int p = 0; p < world; ++p) fill_shard(comm, shard_in(whole, p), p, rank);
    algorithm ? shard_exchange(comm).reduce_scatter(whole, to, *algorithm)
              : reduce_scatter(comm, whole, to);
    if (to.elements() == 0) continue;
    const Verdict sum = verify_sum(to, 3 + uint64_t(rank), 10, world, comm.stream());
    EXPECT_LE(sum.of_bound, 1) << what;
    EXPECT_EQ(sum.not_finite, 0) << what;
  }
  if (algorithm == ShardAlgorithm::one_shot) return;
  for (const Tensor& to : {whole, expected}) {
    if (!algorithm && to.data() != whole.data()) continue;  // in place
    poison(expected, comm.stream());
    fill_uniform(whole, 7, 20 + uint64_t(rank), 0, comm.stream());
    algorithm ? shard_exchange(comm).all_reduce(whole, to) : all_reduce(comm, to);
    const Verdict sum = verify_sum(to, 7, 20, world, comm.stream());
    if (algorithm || whole.bytes() % 16 == 0) {
      EXPECT_LE(sum.of_bound, 1) << what;
    } else {
      EXPECT_LE(sum.max_rel, 0.03) << what;  // NCCL rounds at every hop
    }
    EXPECT_EQ(sum.not_finite, 0) << what;
    comm.require_same("digest", std::to_string(digest(to, comm.stream())));
  }
}

TEST_P(ShardCollectives, GatherAndSumAreExactForAnySizeAndOffset) {
  run([](GpuCommunicator& comm) {
    int call = 0;
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::e4m3}) {
      for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{{1, 1},
                                                                                  {2, 3},
                                                                                  {13, 5},
                                                                                  {64, 8},
                                                                                  {7, 4096},
                                                                                  {1000, 129},
                                                                                  {4099, 512},
                                                                                  {5000, 1024}}) {
        for (const int64_t skip : {0, 3, 3 * (comm.rank() % 2)}) {  // the last: ranks differ
          for (const auto algorithm :
               {std::optional(ShardAlgorithm::one_shot), std::optional(ShardAlgorithm::pipelined),
                std::optional<ShardAlgorithm>()}) {
            if ((++call + comm.rank() * 3) % 5 == 0) launch_pause(200000, comm.stream());
            expect_exact_shards(comm, dtype, rows, columns, skip, algorithm);
          }
        }
      }
    }
    comm.synchronize();
  });
}

TEST_P(ShardCollectives, CallsNeedNoBarrierBetweenThem) {
  if (ranks() == 1) GTEST_SKIP() << "one rank exchanges nothing";
  run([](GpuCommunicator& comm) {
    const int world = comm.size(), rank = comm.rank();
    const DeviceMemory memory(24 << 20), shard_memory(24 << 20);
    const int64_t sizes[] = {8, 3 << 20, 4096, 131072, 72, 1 << 19, 11 << 20};
    std::vector<uint64_t> digests;
    for (int i = 0; i < 300; ++i) {
      const int64_t columns = sizes[size_t(i * 5 + i / 7) % 7] / 8;
      const Tensor whole = memory.view(DType::bf16, {8, columns});
      const Shard local = shard_of(8, world, rank);
      const Tensor shard = shard_memory.view(DType::bf16, {local.count, columns});
      if ((i * 7 + rank * 3) % 11 == 0) launch_pause(30000, comm.stream());
      fill_uniform(whole, uint64_t(i), 10 + uint64_t(rank), 0, comm.stream());
      ShardExchange& exchange = shard_exchange(comm);
      if (i % 3 == 0) {
        exchange.all_reduce(whole, whole);
      } else {
        const ShardAlgorithm algorithm = i % 2 ? ShardAlgorithm::pipelined : exchange.choose(whole);
        exchange.reduce_scatter(whole, shard, algorithm);
        poison(whole, comm.stream());
        exchange.all_gather(shard, whole, algorithm);
      }
      const Verdict verdict = verify_sum(whole, uint64_t(i), 10, world, comm.stream());
      ASSERT_LE(verdict.of_bound, 1) << "call " << i;
      ASSERT_EQ(verdict.not_finite, 0) << "call " << i;
    }
  });
}

TEST_P(ShardCollectives, CapturedCallsReplay) {
  if (ranks() == 1) GTEST_SKIP() << "one rank exchanges nothing";
  run([](GpuCommunicator& comm) {
    for (const ShardAlgorithm algorithm : {ShardAlgorithm::one_shot, ShardAlgorithm::pipelined}) {
      const int64_t columns = algorithm == ShardAlgorithm::one_shot ? 72 : 2048;
      const Matrix whole(DType::bf16, int64_t(600) * comm.size(), columns),
          shard(DType::bf16, 600, columns);
      ShardExchange& exchange = shard_exchange(comm);
      const auto calls = [&] {
        exchange.reduce_scatter(whole.tensor, shard.tensor, algorithm);
        exchange.all_gather(shard.tensor, whole.tensor, algorithm);
      };
      const CapturedCalls graph(comm, calls);
      for (int i = 0; i < 20; ++i) {
        fill_uniform(whole.tensor, uint64_t(i), 10 + uint64_t(comm.rank()), 0, comm.stream());
        if ((i + comm.rank()) % 3 == 0) launch_pause(50000, comm.stream());
        i % 4 == 3 ? calls() : graph.launch();
        const Verdict sum = verify_sum(whole.tensor, uint64_t(i), 10, comm.size(), comm.stream());
        ASSERT_LE(sum.of_bound, 1) << gpu::name_of(algorithm) << " call " << i;
        ASSERT_EQ(sum.not_finite, 0) << gpu::name_of(algorithm) << " call " << i;
      }
    }
  });
}

TEST_P(LostShardCollectives, AbsentRankIsNamed) {
  // With the wider input, senders fill the FIFOs of the ranks that are present.
  const auto expect_named = [&](const char* op, int64_t columns,
                                const std::function<void(ShardExchange&, const Tensor&)>& call) {
    const auto error = timeout_without_last([&](GpuCommunicator& comm) {
      ShardExchange& exchange = shard_exchange(comm);
      const int64_t rows = int64_t(16) * comm.size();
      const auto memory = std::make_shared<DeviceMemory>(size_t(rows * columns) * sizeof(float));
      return [=, &exchange, &call] { call(exchange, memory->view(DType::f32, {rows, columns})); };
    });
    EXPECT_EQ(error ? error->op : "", op) << columns;
  };
  for (const int64_t columns : {int64_t(16), int64_t(1) << 18}) {
    for (const ShardAlgorithm algorithm : {ShardAlgorithm::one_shot, ShardAlgorithm::pipelined}) {
      if (algorithm == ShardAlgorithm::one_shot && columns > 16) continue;
      expect_named("all_gather", columns,
                   [algorithm](ShardExchange& exchange, const Tensor& whole) {
                     exchange.all_gather(whole.rows(0, 16), whole, algorithm);
                   });
      expect_named("reduce_scatter", columns,
                   [algorithm](ShardExchange& exchange, const Tensor& whole) {
                     exchange.reduce_scatter(whole, whole.rows(0, 16), algorithm);
                   });
    }
    expect_named("all_reduce", columns, [](ShardExchange& exchange, const Tensor& whole) {
      exchange.all_reduce(whole, whole);
    });
  }
}

// The others have timed out when a late rank, whose FIFOs they had filled, makes the call: it must
// not accept as its remaining data what they stored since, or did not store, and must time out too.
TEST_P(LostShardCollectives, LateRankTimesOutToo) {
  using Call = std::function<void(ShardExchange&, const Tensor&)>;
  const auto all_gather = [](ShardExchange& exchange, const Tensor& whole) {
    exchange.all_gather(whole.rows(0, 16), whole, ShardAlgorithm::pipelined);
  };
  const auto reduce_scatter = [](ShardExchange& exchange, const Tensor& whole) {
    exchange.reduce_scatter(whole, whole.rows(0, 16), ShardAlgorithm::pipelined);
  };
  const auto all_reduce = [](ShardExchange& exchange, const Tensor& whole) {
    exchange.all_reduce(whole, whole);
  };
  for (const Call& call : {Call(all_gather), Call(reduce_scatter), Call(all_reduce)}) {
    std::latch done(ranks());
    std::atomic<int> gave_up = 0;
    const auto body = [&](GpuCommunicator& comm) {
      const int64_t rows = int64_t(16) * comm.size(), columns = int64_t(1) << 18;
      const DeviceMemory memory(size_t(rows * columns) * sizeof(float));
      ShardExchange& exchange = shard_exchange(comm);
      comm.set_deadline(0.5);
      if (comm.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      try {
        call(exchange, memory.view(DType::f32, {rows, columns}));
        comm.synchronize();
        done.count_down();
      } catch (const Timeout&) {
        ++gave_up;
        done.arrive_and_wait();  // an error ends the waits of the others
        throw;
      } catch (...) {
        done.count_down();
        throw;
      }
    };
    EXPECT_THROW(run(body, 5), Timeout);
    EXPECT_EQ(gave_up, ranks());
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, ShardCollectives, testing::Values(1, 2, 3, 4), gpus_name);
INSTANTIATE_TEST_SUITE_P(Gpu, LostShardCollectives, testing::Values(2, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
