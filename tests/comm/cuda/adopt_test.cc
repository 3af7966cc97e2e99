// Worlds made from the caller's ncclComm_t and stream: of one rank, and of a rank on each GPU of
// this machine, up to four. gpu_main.cc disables NVLink multicast before the first NCCL call.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <nccl.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/nccl_communicator.h"
#include "core/cuda/current_device.h"
#include "tandem/collectives.h"
#include "tandem/overlap.h"
#include "tandem/world.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/error_of.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/operands.h"

namespace tandem::test {
namespace {

using namespace gpu;
using testing::HasSubstr;

/// Caller's communicators of `size` GPUs, and the threads of their ranks.
class Callers {
 public:
  explicit Callers(int size) : comms_(size_t(size)) {
    check(ncclCommInitAll(comms_.data(), size, nullptr), "ncclCommInitAll");
  }
  ~Callers() { destroy(); }
  Callers(const Callers&) = delete;
  Callers& operator=(const Callers&) = delete;
  void destroy() {
    const CurrentDevice unchanged;
    for (ncclComm_t& comm : comms_) {
      if (comm) ncclCommDestroy(comm);
      comm = nullptr;
    }
  }
  ncclComm_t of(int rank) const { return comms_[size_t(rank)]; }

  /// Runs each rank on a thread, with its GPU current and a stream of the caller.
  void run(const std::function<void(int rank, cudaStream_t stream)>& body) const {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < int(comms_.size()); ++rank) {
      threads.emplace_back([&body, rank] {
        check(cudaSetDevice(rank), "cudaSetDevice");
        const Stream stream;
        body(rank, stream.get());
      });
    }
  }

 private:
  std::vector<ncclComm_t> comms_;
};

class AdoptNccl : public testing::Test {
 protected:
  static std::set<int> sizes() { return {1, std::min(gpu_count(), 4)}; }
  static World adopt(ncclComm_t comm, cudaStream_t stream) {
    return World::adopt_nccl(comm, stream, {.deadline_s = 20});
  }
};

TEST_F(AdoptNccl, KeepsRankOrderAndRunsOnTheCallersStream) {
  for (const int size : sizes()) {
    const Callers callers(size);
    callers.run([&](int rank, cudaStream_t stream) {
      const World world = adopt(callers.of(rank), stream);
      EXPECT_EQ(world.size(), size);
      EXPECT_EQ(world.ranks(), std::vector{rank});
      const auto comm = world.communicator();
      EXPECT_EQ(comm->rank(), rank);
      EXPECT_EQ(comm->transport(), "nccl");
      EXPECT_EQ(stream_of(*comm), stream);
      const GpuGuard guard(*comm);
      constexpr int64_t kCount = 1 << 20;
      const Matrix data(DType::i32, 1, kCount);
      std::vector<int> host(kCount, rank + 1);
      const size_t bytes = size_t(kCount) * sizeof(int);
      // No host wait: only the stream orders these calls.
      check(cudaMemcpyAsync(data.tensor.data(), host.data(), bytes, cudaMemcpyDefault, stream),
            "write");
      all_reduce(*comm, data.tensor);
      check(cudaMemcpyAsync(host.data(), data.tensor.data(), bytes, cudaMemcpyDefault, stream),
            "read");
      synchronize(*comm);
      EXPECT_THAT(host, testing::Each(size * (size + 1) / 2));
    });
  }
}

TEST_F(AdoptNccl, CommunicatorMayBeDestroyedBeforeTheWorldAndTheWorldBeforeItsOperators) {
  for (const int size : sizes()) {
    Callers callers(size);
    std::vector<std::optional<World>> worlds{size_t(size)};
    callers.run([&](int rank, cudaStream_t stream) {
      auto& world = worlds[size_t(rank)];
      world.emplace(adopt(callers.of(rank), stream));
      set_stream(*world->communicator(), nullptr);  // the caller's stream ends with this thread
    });
    callers.destroy();
    callers.run([&](int rank, cudaStream_t stream) {
      auto& world = worlds[size_t(rank)];
      auto& comm = as_gpu(*world->communicator());
      const GpuGuard guard(comm);
      comm.set_stream(stream);
      const OpDesc shape{96, 40, 64, DType::bf16};
      tandem::AgGemm op(comm, {.m = 96, .n = 40, .k = 64, .dtype = DType::bf16});
      const Operands operands = ag_operands(comm, shape, 5);
      world.reset();
      op.run(operands.x, operands.weight, operands.out);
      expect_right(comm, operands, "without its world");
    });
  }
}

TEST_F(AdoptNccl, CallersNcclCallsMayAlternateWithTheWorlds) {
  for (const int size : sizes()) {
    const Callers callers(size);
    callers.run([&](int rank, cudaStream_t stream) {
      const World world = adopt(callers.of(rank), stream);
      const auto comm = world.communicator();
      const GpuGuard guard(*comm);
      const Matrix data(DType::i32, 1, 1000);
      auto* words = static_cast<int*>(data.tensor.data());
      write(as_gpu(*comm), words, std::vector<int>(1000, 1));
      int expected = 1;
      for (int call = 0; call < 3; ++call, expected *= size * size) {
        check(ncclAllReduce(words, words, 1000, ncclInt32, ncclSum, callers.of(rank), stream),
              "ncclAllReduce");
        all_reduce(*comm, data.tensor);
      }
      EXPECT_THAT(read<int>(as_gpu(*comm), data.tensor), testing::Each(expected));
      world.abort("the world alone");
      EXPECT_THROW(comm->barrier(), Aborted);
      ncclResult_t state = ncclInternalError;
      check(ncclCommGetAsyncError(callers.of(rank), &state), "ncclCommGetAsyncError");
      EXPECT_EQ(state, ncclSuccess) << "the caller's is not the world's";
    });
  }
}

TEST_F(AdoptNccl, NullCommunicatorIsRejected) {
  EXPECT_EQ(error_of<InvalidArgument>([] { World::adopt_nccl(nullptr, nullptr); }),
            "adopt_nccl: a null communicator: expected an ncclComm_t");
}

TEST_F(AdoptNccl, UnsupportedOptionsAndStreamsAreRejected) {
  const Callers callers(1);
  callers.run([&](int rank, cudaStream_t stream) {
    const auto with = [&](const WorldOptions& options) {
      return error_of<InvalidArgument>(
          [&] { World::adopt_nccl(callers.of(rank), stream, options); });
    };
    EXPECT_THAT(with({.ranks = 2}), HasSubstr("ranks 2: the communicator has 1"));
    EXPECT_THAT(with({.ranks_per_gpu = 2}), HasSubstr("2 ranks a GPU"));
    WorldOptions linked;
    linked.link = EmulatedLink::parse("1GB/s,5us");
    EXPECT_THAT(with(linked), HasSubstr("expected none"));
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "begin a capture");
    EXPECT_THAT(with({}), HasSubstr("a stream that is captured"));
    check(cudaStreamEndCapture(stream, &graph), "end a capture");
    cudaGraphDestroy(graph);
    adopt(callers.of(rank), stream);  // the communicator is unchanged
  });
}

TEST_F(AdoptNccl, WrongDeviceIsRejectedOnAllRanks) {
  if (gpu_count() < 2) GTEST_SKIP() << "needs 2 GPUs";
  const Callers callers(2);
  callers.run([&](int rank, cudaStream_t stream) {
    check(cudaSetDevice(0), "cudaSetDevice");
    const std::string text = error_of<InvalidArgument>([&] { adopt(callers.of(rank), stream); });
    EXPECT_THAT(text, HasSubstr("the current device is cuda:0: expected the communicator's, "
                                "cuda:1"));
    if (rank == 0) {
      EXPECT_THAT(text, HasSubstr("adopt_nccl: rank 1: "));
    }
  });
}

TEST_F(AdoptNccl, AbsentRankTimesOut) {
  if (gpu_count() < 2) GTEST_SKIP() << "needs 2 GPUs";
  ncclComm_t comms[2] = {};
  check(ncclCommInitAll(comms, 2, nullptr), "ncclCommInitAll");
  {
    const CurrentDevice first(0);
    const Stream stream;
    EXPECT_THROW(World::adopt_nccl(comms[0], stream.get(), {.deadline_s = 1}), Timeout);
  }
  for (const ncclComm_t comm : comms) ncclCommAbort(comm);
}

}  // namespace
}  // namespace tandem::test
