// MoE layers on GPU ranks that share an operator: matching of calls, and shared state.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string>

#include "comm/device/signal_kernels.h"
#include "core/cuda/common_stream.h"
#include "tandem/error.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/moe/cuda/gradient_problem.h"
#include "tests/overlap/moe/cuda/shapes.h"

namespace tandem::test {
namespace {

using namespace gpu;

class MoeCalls : public OnGpus {};

MoeShape small(const Communicator& comm, int64_t tokens = 50) {
  return two_experts_each(comm, tokens, 264);
}

void forward(MoeLayer& layer, const MoeGradientCase& p, MoeBatch& batch) {
  layer.forward(p.x(), p.routing(), p.w_in, p.w_out, p.out(), batch);
}
void backward(MoeLayer& layer, const MoeGradientCase& p, const MoeBatch& batch) {
  layer.backward(p.dout(), p.w_in, p.w_out, batch, p.dx(), p.dweights(), p.dw_in(), p.dw_out());
}

constexpr MoeOptions kTrains{.strategy = Strategy::serial, .backward = true};

TEST_P(MoeCalls, BatchOfADestroyedLayerIsRejectedByANewOne) {
  run([](GpuCommunicator& comm) {
    MoeBatch batch;
    auto layer = std::make_unique<MoeLayer>(comm, small(comm, 20), kTrains);
    MoeGradientCase few(comm, small(comm, 20));
    few.route({}, 1);
    forward(*layer, few, batch);
    for (const int64_t tokens : {20, 200}) {  // the same operator's shape, and a larger one
      layer.reset();
      layer = std::make_unique<MoeLayer>(comm, small(comm, tokens), kTrains);
      MoeGradientCase p(comm, small(comm, tokens));
      p.route({}, 2);
      p.reset();
      EXPECT_THROW(backward(*layer, p, batch), InvalidArgument);
      forward(*layer, p, batch);
      backward(*layer, p, batch);
      p.expect_right(p.found(), fmt::format("{} tokens", tokens));
    }
  });
}

TEST_P(MoeCalls, RejectedForwardLeavesItsBatchEmpty) {
  run([](GpuCommunicator& comm) {
    MoeLayer layer(comm, small(comm), kTrains);
    MoeGradientCase p(comm, small(comm));
    p.route({}, 1);
    p.reset();
    MoeBatch batch;
    forward(layer, p, batch);
    EXPECT_THROW(layer.forward(p.x(), p.routing(), p.w_out, p.w_out, p.out(), batch),
                 InvalidArgument);
    EXPECT_THROW(backward(layer, p, batch), InvalidArgument);
    forward(layer, p, batch);
    backward(layer, p, batch);
    p.expect_right(p.found(), "after a refused call");
  });
}

TEST_P(MoeCalls, LayersOfOneShapeShareEverythingExceptBatches) {
  run([](GpuCommunicator& comm) {
    const MoeShape s{.tokens = 512,
                     .hidden = 512,
                     .ffn = 512,
                     .experts = 2 * comm.size(),
                     .top_k = 2,
                     .dtype = DType::bf16};
    const auto used = [&] {
      comm.barrier("memory is read");
      size_t bytes = 0;
      cudaMemPool_t pool = nullptr;
      check(cudaDeviceGetDefaultMemPool(&pool, comm.device()), "pool");
      check(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &bytes), "pool");
      comm.barrier("memory has been read");
      return int64_t(bytes);
    };
    constexpr int64_t kMiB = 1 << 20;
    const int64_t none = used();
    std::array<std::unique_ptr<MoeLayer>, 4> layers;
    layers[0] = std::make_unique<MoeLayer>(comm, s, kTrains);
    const int64_t one = used();
    // With a GPU per rank, memory is not from the pool and includes other processes.
    if (comm.shares_gpu()) {
      EXPECT_GT(one - none, 4 * kMiB);
    }
    for (size_t i = 1; i < layers.size(); ++i) {
      layers[i] = std::make_unique<MoeLayer>(comm, s, kTrains);
    }
    EXPECT_LT(used() - one, kMiB);
    // Each layer has its own weights and batch; calls alternate between layers.
    const MoeShape few = small(comm);
    std::array<std::unique_ptr<MoeLayer>, 3> trained;
    std::array<std::unique_ptr<MoeGradientCase>, 3> problems;
    std::array<MoeBatch, 3> batches;
    for (size_t i = 0; i < trained.size(); ++i) {
      trained[i] = std::make_unique<MoeLayer>(comm, few, kTrains);
      problems[i] = std::make_unique<MoeGradientCase>(comm, few);
      problems[i]->route({.imbalance = double(i)}, 5 + i);
      problems[i]->reset();
      forward(*trained[i], *problems[i], batches[i]);
    }
    EXPECT_THROW(backward(*trained[0], *problems[0], batches[1]), InvalidArgument);
    for (size_t i = trained.size(); i-- > 0;) backward(*trained[i], *problems[i], batches[i]);
    for (size_t i = 0; i < trained.size(); ++i) {
      problems[i]->expect_right(problems[i]->found(), fmt::format("layer {}", i));
      EXPECT_EQ(trained[i]->dropped_routings(), 0);
    }
    // Ranks may destroy them at any time.
    if (comm.rank() == 0) trained = {};
    trained[0] = std::make_unique<MoeLayer>(comm, few, kTrains);
    problems[0]->reset();
    forward(*trained[0], *problems[0], batches[0]);
    backward(*trained[0], *problems[0], batches[0]);
    problems[0]->expect_right(problems[0]->found(), "a layer after rank 0 dropped all");
  });
}

// Blocks that join the first GEMM late wait until the send kernel has its SMs, however late it
// starts.
TEST_P(MoeCalls, SendKernelMayStartLate) {
  run([&](GpuCommunicator& comm) {
    const MoeShape s = small(comm, 600);
    MoeOnGpus layer(comm, s, {.strategy = Strategy::overlapped}, Choosing::first, false);
    MoeCase p(comm, s);
    p.route({.imbalance = 0}, 1);
    const CommonStream side(Common::side);
    for (size_t candidate = 0; candidate < layer.candidates().size(); ++candidate) {
      p.poison();
      comm.synchronize();
      if (comm.shares_gpu()) launch_pause(3'000'000, side.get());
      layer.run(candidate, p.x(), p.routing(), p.w_in, p.w_out, p.out());
      p.expect_right(p.result<uint16_t>(), layer.candidates()[candidate].name);
    }
  });
}

// Skewed and empty routings: blocks join depending on the call's counts.
TEST_P(MoeCalls, AnyRoutingFitsTheTablesOfEveryCandidate) {
  run([&](GpuCommunicator& comm) {
    const MoeShape s = small(comm, 300);
    for (const bool sorts : {false, true}) {
      MoeOnGpus layer(comm, s, {}, Choosing::first, sorts);
      MoeCase p(comm, s);
      for (const MoeRoutes& load : loads(comm.size())) {
        p.route(load, 3);
        for (size_t candidate = 0; candidate < layer.candidates().size(); ++candidate) {
          p.poison();
          layer.run(candidate, p.x(), p.routing(), p.w_in, p.w_out, p.out());
          p.expect_right(p.result<uint16_t>(),
                         std::string(load.name) + ", " + layer.candidates()[candidate].name);
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, MoeCalls, testing::Values(1, 2, 3, 4, 8), gpus_name);

class MoeOtherCalls : public OnGpus {
 protected:
  /// All ranks make layers and run forward; then the last rank makes a different call, and every
  /// rank reports both.
  template <typename Call>
  void expect_mismatch(const std::string& named, const Call& call) {
    std::atomic<int> notified{0};
    try {
      run([&](GpuCommunicator& comm) {
        std::array<std::unique_ptr<MoeLayer>, 2> layers;
        for (auto& layer : layers) layer = std::make_unique<MoeLayer>(comm, small(comm), kTrains);
        MoeGradientCase p(comm, small(comm));
        p.route({}, 1);
        p.reset();
        std::array<MoeBatch, 3> batches;
        for (size_t i = 0; i < batches.size(); ++i) forward(*layers[i == 2], p, batches[i]);
        comm.synchronize();
        comm.barrier("all have passed forward");
        try {
          call(comm, layers, p, batches);
          comm.synchronize();
          ADD_FAILURE() << "no error on rank " << comm.rank();
        } catch (const Mismatch& error) {
          EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
          ++notified;
          throw;
        }
      });
      ADD_FAILURE() << "no error";
    } catch (const Mismatch&) {
    }
    EXPECT_EQ(notified, ranks());
  }
  static bool is_last(const GpuCommunicator& comm) { return comm.rank() + 1 == comm.size(); }
};

TEST_P(MoeOtherCalls, ForwardAndBackwardAreAMismatch) {
  expect_mismatch("the backward pass of its call 1",
                  [](GpuCommunicator& comm, auto& layers, const MoeGradientCase& p, auto& batches) {
                    if (!is_last(comm)) return forward(*layers[0], p, batches[1]);
                    backward(*layers[0], p, batches[0]);
                  });
}

TEST_P(MoeOtherCalls, BatchesOfDifferentCallsAreAMismatch) {
  expect_mismatch("the backward pass of its call 2",
                  [](GpuCommunicator& comm, auto& layers, const MoeGradientCase& p, auto& batches) {
                    backward(*layers[0], p, batches[is_last(comm) ? 1 : 0]);
                  });
}

TEST_P(MoeOtherCalls, DifferentLayersAreAMismatch) {
  expect_mismatch("layer 2, forward",
                  [](GpuCommunicator& comm, auto& layers, const MoeGradientCase& p, auto& batches) {
                    forward(*layers[is_last(comm) ? 1 : 0], p, batches[0]);
                  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, MoeOtherCalls, testing::Values(2, 3, 4, 8), gpus_name);

class MoeMemory : public OnGpus {};

// The GPU has memory for one rank's layer but not for two, or for none on the last rank.
TEST_P(MoeMemory, OutOfMemoryOnOneRankFailsOnAllRanks) {
  run([](GpuCommunicator& comm) {
    const MoeShape s{.tokens = 1024,
                     .hidden = 64,
                     .ffn = 32768,
                     .experts = 2 * comm.size(),
                     .top_k = 2,
                     .dtype = DType::bf16};
    constexpr size_t kLeft = size_t(400) << 20;  // a rank's layer takes about 300 MiB
    void* taken = nullptr;
    comm.synchronize();
    comm.barrier("before memory is taken");
    if (comm.rank() + 1 == comm.size()) {
      cudaMemPool_t pool = nullptr;
      check(cudaDeviceGetDefaultMemPool(&pool, comm.device()), "pool");
      check(cudaMemPoolTrimTo(pool, 0), "pool");
      size_t free = 0, all = 0;
      check(cudaMemGetInfo(&free, &all), "memory");
      const size_t left = comm.shares_gpu() ? kLeft : kLeft / 4;
      if (free > left) check(cudaMalloc(&taken, free - left), "take memory");
    }
    comm.barrier("memory is taken");
    EXPECT_THROW(MoeLayer(comm, s, {.strategy = Strategy::serial}), DeviceError);
    comm.barrier("all were told");
    if (taken) check(cudaFree(taken), "give memory back");
    comm.barrier("memory is back");
    MoeLayer(comm, s, {.strategy = Strategy::serial});
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, MoeMemory, testing::Values(2), gpus_name);

}  // namespace
}  // namespace tandem::test
