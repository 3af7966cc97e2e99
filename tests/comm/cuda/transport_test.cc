// Guarantees of the nccl transport: order, epochs, deadlines; and the all-reduce kernels.
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "bench/cuda/verify.h"
#include "collectives/cuda/all_reduce.h"
#include "comm/device/signal_kernels.h"
#include "overlap/contract/cuda/wait_ids.h"
#include "tandem/collectives.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

using namespace gpu;

class Transport : public OnGpus {};
class Pairs : public OnGpus {};

TEST_P(Transport, PutsArriveBeforeTheirSignalThroughManyEpochs) {
  run([](GpuCommunicator& comm) {
    constexpr size_t kCount = 1000;
    const auto buffer = comm.allocate(size_t(comm.size()) * kCount * sizeof(int), 2 * comm.size());
    const DeviceMemory source(kCount * sizeof(int));
    std::vector<int> values(kCount);
    for (uint64_t epoch = 1; epoch <= 50; ++epoch) {
      std::iota(values.begin(), values.end(), int(epoch) * 7919 + comm.rank());
      write(comm, source.data(), values);
      for (int peer = 0; peer < comm.size(); ++peer) {
        comm.put(peer, *buffer, size_t(comm.rank()) * source.bytes(), source.data(), source.bytes(),
                 comm.rank(), epoch);
      }
      for (int from = 0; from < comm.size(); ++from) {
        comm.wait(*buffer, from, epoch, {"test", from});
        const auto seen = read<int>(comm, buffer->local() + size_t(from) * source.bytes(), kCount);
        std::iota(values.begin(), values.end(), int(epoch) * 7919 + from);
        ASSERT_EQ(seen, values) << "epoch " << epoch << " from " << from;
        comm.put(from, *buffer, 0, nullptr, 0, comm.size() + comm.rank(), epoch);  // ack
      }
      for (int peer = 0; peer < comm.size(); ++peer) {
        comm.wait(*buffer, comm.size() + peer, epoch, {"acknowledge", peer});
      }
      comm.flush();
    }
  });
}

TEST_P(Transport, RejectsOutOfRangeArguments) {
  run([](GpuCommunicator& comm) {
    const auto buffer = comm.allocate(64, 1);
    EXPECT_THROW(comm.put(comm.size(), *buffer, 0, nullptr, 0, 0, 1), InvalidArgument);
    EXPECT_THROW(comm.put(0, *buffer, 60, nullptr, 8, 0, 1), InvalidArgument);
    EXPECT_THROW(comm.put(0, *buffer, 0, nullptr, 0, 1, 1), InvalidArgument);
  });
}

TEST_P(Pairs, DifferentSizesAreAMismatchOnEveryRank) {
  EXPECT_THROW(run([](GpuCommunicator& comm) { comm.allocate(64 + size_t(comm.rank()), 1); }),
               Mismatch);
}

TEST_P(Pairs, DeviceSideWaitNamesTheAbsentRank) {
  const auto error = timeout_without_last([](GpuCommunicator& comm) {
    const auto buffer = std::static_pointer_cast<GpuBuffer>(comm.allocate(0, kMaxGpus));
    const auto epoch = std::make_shared<DeviceMemory>(sizeof(uint64_t));
    return [&comm, buffer, epoch] {
      launch_enter(buffer->table(), 0, {reinterpret_cast<uint64_t*>(epoch->data())},
                   comm.device_deadline(), kAgGemmWait, comm.stream());
    };
  });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->op, "ag_gemm");
  EXPECT_EQ(error->epoch, 1u);
}

// The device waits for a signal that no rank sends, and the host waits for the device. The world is
// aborted; the waits are in the world or in a communicator split from it.
TEST_P(Pairs, AbortEndsDeviceSideWaitsLongBeforeTheirDeadline) {
  using Clock = std::chrono::steady_clock;
  for (const bool in_split : {false, true}) {
    std::atomic<int> aborted = 0;
    const auto body = [&](GpuCommunicator& world) {
      const auto group = world.split(0, world.rank());
      GpuCommunicator& comm = in_split ? as_gpu(*group) : world;
      const auto buffer = std::static_pointer_cast<GpuBuffer>(comm.allocate(0, kMaxGpus));
      const DeviceMemory epoch(sizeof(uint64_t));
      comm.barrier("all are ready");
      const auto begin = Clock::now();
      if (comm.rank() == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        world.abort("enough");
      } else {
        launch_wait(buffer->table(), 0, 0, reinterpret_cast<uint64_t*>(epoch.data()), true,
                    comm.device_deadline(), OpId::wait, comm.stream());
      }
      try {
        comm.synchronize();
        EXPECT_EQ(comm.rank(), 0) << "the wait ended";
      } catch (const Aborted& error) {
        EXPECT_EQ(error.origin, 0);
        ++aborted;
      }
      EXPECT_THROW(comm.wait(*buffer, 0, 1, {"later"}), Aborted);
      EXPECT_EQ(cudaStreamSynchronize(comm.stream()), cudaSuccess);  // no kernel waits any more
      EXPECT_LT(std::chrono::duration<double>(Clock::now() - begin).count(), 10);
      world.barrier("later too");
    };
    EXPECT_THROW(run(body, 40), Aborted);
    EXPECT_GE(aborted, ranks() - 1);
  }
}

TEST_P(Pairs, RejectedAllToAllLeavesNoGroupOpen) {
  run([](GpuCommunicator& comm) {
    const DeviceMemory out_memory(64), in_memory(64);
    const Tensor out = out_memory.view(DType::i32, {8, 1}), in = in_memory.view(DType::i32, {8, 1}),
                 floats = in_memory.view(DType::f32, {8, 1});
    const std::vector<int64_t> one_each(size_t(comm.size()), 1);
    std::vector<int64_t> negative = one_each;
    negative[0] = -1;
    gpu::check(cudaMemsetAsync(out.data(), comm.rank() + 1, out.bytes(), comm.stream()), "set");
    gpu::check(cudaMemsetAsync(in.data(), 0, in.bytes(), comm.stream()), "clear");
    EXPECT_THROW(all_to_all(comm, out, negative, in, one_each), InvalidArgument);
    EXPECT_THROW(all_to_all(comm, out, one_each, in, negative), InvalidArgument);
    EXPECT_THROW(all_to_all(comm, out, one_each, floats, one_each), InvalidArgument);
    all_to_all(comm, out, one_each, in, one_each);
    std::vector<int> expected(8, 0);
    for (int r = 0; r < comm.size(); ++r) expected[size_t(r)] = 0x01010101 * (r + 1);
    EXPECT_EQ(read<int>(comm, in), expected);
  });
}

TEST_P(Transport, AllReduceIsExactOnEveryRankAndRepeats) {
  if (ranks() == 1) GTEST_SKIP() << "one rank exchanges nothing";
  run([](GpuCommunicator& comm) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      AllReduce all_reduce(comm, 1 << 21, dtype);
      int tried = 0;
      for (const int64_t elements : {8, 1000, 4096, 65544, 1 << 20, 1 << 21}) {
        const DeviceMemory in_memory(size_t(elements) * size_of(dtype)),
            out_memory(size_t(elements) * size_of(dtype));
        const Tensor in = in_memory.view(dtype, {1, elements}),
                     out = out_memory.view(dtype, {1, elements});
        fill_uniform(in, 5, 10 + uint64_t(comm.rank()), 0, comm.stream());
        for (const AllReduceAlgorithm algorithm :
             {AllReduceAlgorithm::one_shot, AllReduceAlgorithm::two_shot}) {
          if (!all_reduce.fits(elements, algorithm)) continue;
          ++tried;
          std::vector<uint64_t> digests;
          for (int i = 0; i < 20; ++i) {
            poison(out, comm.stream());
            all_reduce.run(in, out, algorithm);
            digests.push_back(digest(out, comm.stream()));
          }
          comm.synchronize();
          const Verdict verdict = verify_sum(out, 5, 10, comm.size(), comm.stream());
          EXPECT_LE(verdict.of_bound, 1) << name_of(dtype) << elements << gpu::name_of(algorithm);
          EXPECT_EQ(verdict.not_finite, 0) << name_of(dtype) << elements << gpu::name_of(algorithm);
          EXPECT_EQ(std::vector<uint64_t>(20, digests[0]), digests);
          comm.require_same("digest", std::to_string(digests[0]));
        }
      }
      EXPECT_GE(tried, 6) << name_of(dtype);
    }
  });
}

TEST_P(Transport, AllReduceSizesMayAlternate) {
  if (ranks() == 1) GTEST_SKIP() << "one rank exchanges nothing";
  run([](GpuCommunicator& comm) {
    AllReduce all_reduce(comm, 1 << 20, DType::bf16);
    const DeviceMemory in_memory(2 << 20), out_memory(2 << 20);
    const int64_t sizes[] = {8, 1 << 20, 4096, 131072, 72, 1 << 19};
    for (int i = 0; i < 600; ++i) {
      const int64_t elements = sizes[size_t(i * 5 + i / 7) % 6];
      const Tensor in = in_memory.view(DType::bf16, {1, elements}),
                   out = out_memory.view(DType::bf16, {1, elements});
      if ((i * 7 + comm.rank() * 3) % 11 == 0) launch_pause(30000, comm.stream());
      fill_uniform(in, uint64_t(i), 10 + uint64_t(comm.rank()), 0, comm.stream());
      all_reduce.run(in, out, all_reduce.choose(elements));
      const Verdict verdict = verify_sum(out, uint64_t(i), 10, comm.size(), comm.stream());
      ASSERT_LE(verdict.of_bound, 1) << "call " << i;
    }
  });
}

// Any bit patterns; later calls are right again.
TEST_P(Transport, AllReduceCarriesNaNs) {
  if (ranks() == 1) GTEST_SKIP() << "one rank exchanges nothing";
  run([](GpuCommunicator& comm) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const int64_t elements = 40000;
      AllReduce all_reduce(comm, elements, dtype);
      const DeviceMemory in_memory(size_t(elements) * size_of(dtype)),
          out_memory(size_t(elements) * size_of(dtype));
      const Tensor in = in_memory.view(dtype, {1, elements}),
                   out = out_memory.view(dtype, {1, elements});
      for (const AllReduceAlgorithm algorithm :
           {AllReduceAlgorithm::one_shot, AllReduceAlgorithm::two_shot}) {
        for (int i = 0; i < 4; ++i) {
          fill_uniform(in, 5, 10 + uint64_t(comm.rank()), 0, comm.stream());
          const bool ones = i % 2 == 0;
          if (ones && comm.rank() == i / 2) {
            gpu::check(cudaMemsetAsync(in.data(), 0xff, in.bytes(), comm.stream()), "NaNs");
          }
          all_reduce.run(in, out, algorithm);
          comm.synchronize();
          const Verdict verdict = verify_sum(out, 5, 10, comm.size(), comm.stream());
          EXPECT_EQ(verdict.not_finite, ones ? elements : 0) << name_of(dtype) << i;
          if (!ones) {
            EXPECT_LE(verdict.of_bound, 1) << name_of(dtype) << i;
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Transport, testing::Values(1, 2, 3, 4), gpus_name);
INSTANTIATE_TEST_SUITE_P(Gpu, Pairs, testing::Values(2, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
