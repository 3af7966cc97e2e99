// Worlds of GPU ranks that outlive a callback: ownership, order of destruction, threads, and
// aborts. On a machine with one GPU the ranks share it.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tandem/collectives.h"
#include "tandem/overlap.h"
#include "tandem/world.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/operands.h"

namespace tandem::test {
namespace {

using namespace gpu;

using Ranks = std::vector<std::shared_ptr<Communicator>>;

Ranks ranks_of(const World& world) {
  Ranks all;
  for (const int rank : world.ranks()) all.push_back(world.communicator(rank));
  return all;
}

/// Runs `body(comm)` for each rank on its own thread, with its GPU current.
template <typename Body>
void on_ranks(const Ranks& ranks, const Body& body) {
  std::vector<std::jthread> threads;
  for (const auto& rank : ranks) {
    threads.emplace_back([&body, rank]() mutable {
      std::optional<GpuGuard> guard(*rank);
      body(std::move(rank));
    });
  }
}

class OwnedWorld : public OnGpus {
 protected:
  World world(double deadline_s = 20) const {
    return World::of_gpus({ranks(), {}, deadline_s, ranks_per_gpu(ranks())});
  }
};

void sum_up(GpuCommunicator& comm) {
  const Matrix data(DType::i32, 1, 1000);
  write(comm, static_cast<int*>(data.tensor.data()), std::vector<int>(1000, comm.rank() + 1));
  all_reduce(comm, data.tensor);
  const int sum = comm.size() * (comm.size() + 1) / 2;
  EXPECT_THAT(read<int>(comm, data.tensor), testing::Each(sum));
}

/// An operator that owns all of its operands.
struct Product {
  static constexpr int64_t kM = 96, kN = 40, kK = 64;
  AgGemm op;
  Operands operands;
  explicit Product(GpuCommunicator& comm)
      : op(comm, {.m = kM, .n = kN, .k = kK, .dtype = DType::bf16},
           {.strategy = comm.size() > 1 ? Strategy::overlapped : Strategy::serial}),
        operands(ag_operands(comm, {kM, kN, kK, DType::bf16}, 5)) {}
  void run() { op.run(operands.x, operands.weight, operands.out); }
  void check(GpuCommunicator& comm, const std::string& what) {
    run();
    expect_right(comm, operands, what);
  }
};

TEST_P(OwnedWorld, RanksMayBeUsedRepeatedly) {
  const World local_world = world();
  EXPECT_EQ(local_world.size(), ranks());
  EXPECT_EQ(int(local_world.ranks().size()), ranks());
  for (int again = 0; again < 3; ++again) {
    on_ranks(ranks_of(local_world), [](const auto& comm) { sum_up(as_gpu(*comm)); });
  }
}

TEST_P(OwnedWorld, OperatorsOutliveWorldAndHandles) {
  std::optional<World> local_world(world());
  std::vector<std::unique_ptr<Product>> products{size_t(ranks())};
  std::vector<Communicator*> comms{size_t(ranks())};
  on_ranks(ranks_of(*local_world), [&](const auto& comm) {
    products[size_t(comm->rank())] = std::make_unique<Product>(as_gpu(*comm));
    comms[size_t(comm->rank())] = comm.get();
  });
  local_world.reset();
  for (int again = 0; again < 2; ++again) {
    std::vector<std::jthread> threads;
    for (size_t rank = 0; rank < products.size(); ++rank) {
      threads.emplace_back([&, rank] {
        const GpuGuard guard(*comms[rank]);
        products[rank]->check(as_gpu(*comms[rank]), "without a world");
      });
    }
  }
  products.clear();  // in this thread, one rank after the other
}

TEST_P(OwnedWorld, RanksMayDestroyOperatorsInAnyOrder) {
  const World local_world = world();
  on_ranks(ranks_of(local_world), [](const auto& comm) {
    auto& rank = as_gpu(*comm);
    auto first = std::make_unique<Product>(rank), second = std::make_unique<Product>(rank);
    auto long_lived = std::make_unique<Product>(rank);
    first->check(rank, "first");
    second->check(rank, "second");
    (rank.rank() % 2 ? first : second).reset();
    long_lived->check(rank, "kept");
    (rank.rank() % 2 ? second : first).reset();
    Product later(rank);  // frees what all have dropped
    long_lived->check(rank, "kept to the end");
    later.check(rank, "later");
  });
}

TEST_P(OwnedWorld, SplitCommunicatorsOutliveTheirParent) {
  std::optional<World> local_world(world());
  std::vector<std::unique_ptr<Communicator>> groups{size_t(ranks())}, others{size_t(ranks())};
  on_ranks(ranks_of(*local_world), [&](const auto& comm) {
    const auto rank = size_t(comm->rank());
    groups[rank] = comm->split(comm->rank() % 2, 0);
    others[rank] = comm->split(0, -comm->rank());
    sum_up(as_gpu(*comm));
  });
  local_world.reset();
  std::vector<std::jthread> threads;
  for (size_t rank = 0; rank < groups.size(); ++rank) {
    threads.emplace_back([&, rank] {
      std::optional<GpuGuard> guard(*groups[rank]);
      sum_up(as_gpu(*groups[rank]));
      sum_up(as_gpu(*others[rank]));
      guard.reset();
      (rank % 2 ? groups : others)[rank].reset();
      (rank % 2 ? others : groups)[rank].reset();
    });
  }
}

TEST_P(OwnedWorld, PendingWorkEndsBeforeItsRankIsDestroyed) {
  std::optional<World> local_world(world());
  std::vector<std::unique_ptr<Product>> products{size_t(ranks())};
  on_ranks(ranks_of(*local_world), [&](const auto& comm) {
    auto& product = products[size_t(comm->rank())];
    product = std::make_unique<Product>(as_gpu(*comm));
    for (int call = 0; call < 20; ++call) product->run();
  });
  local_world.reset();
  products.clear();
  check(cudaDeviceSynchronize(), "after all");
}

TEST_P(OwnedWorld, GuardRestoresThePreviousDevice) {
  const World local_world = world();
  check(cudaSetDevice(0), "cudaSetDevice");
  for (const auto& comm : ranks_of(local_world)) {
    {
      const GpuGuard guard(*comm), again(*comm);
      int device = -1;
      check(cudaGetDevice(&device), "current device");
      EXPECT_EQ(device, device_of(*comm).index);
      EXPECT_EQ(this_share(), as_gpu(*comm).share_owner());
    }
    int device = -1;
    check(cudaGetDevice(&device), "current device");
    EXPECT_EQ(device, 0);
  }
}

TEST_P(OwnedWorld, AbortEndsTheWaitsOfAllRanks) {
  const World local_world = world(60);
  std::jthread aborting([&] { local_world.abort("enough"); });
  on_ranks(ranks_of(local_world), [](const auto& comm) {
    const auto wait_for_ever = [&] {
      const auto buffer = comm->allocate(64, 1);
      comm->wait(*buffer, 0, 1, {"never"});
    };
    EXPECT_THROW(wait_for_ever(), Aborted);
  });
}

TEST_P(OwnedWorld, ExceptionThatUnwindsTheWorldEndsTheWaits) {
  Ranks left;
  try {
    const World local_world = world(60);
    left = ranks_of(local_world);
    throw std::logic_error("elsewhere");
  } catch (const std::logic_error&) {
    on_ranks(left, [](const auto& comm) { EXPECT_THROW(comm->barrier(), Aborted); });
  }
}

TEST_P(OwnedWorld, RepeatedWorldsLeakNoMemory) {
  const auto free_memory = [] {
    size_t free = 0, all = 0;
    check(cudaMemGetInfo(&free, &all), "free memory");
    return free;
  };
  const auto one_world = [&] {
    const World local_world = world();
    on_ranks(ranks_of(local_world), [](const auto& comm) {
      Product product(as_gpu(*comm));
      product.check(as_gpu(*comm), "one world after the other");
    });
  };
  for (int warm_up = 0; warm_up < 2; ++warm_up) one_world();
  const size_t before = free_memory();
  for (int again = 0; again < 4; ++again) one_world();
  EXPECT_GE(free_memory() + (size_t(16) << 20), before);
}

TEST_P(OwnedWorld, ErrorsMatchThoseOfRunGpus) {
  EXPECT_THROW(World::of_gpus({.ranks = 0}), InvalidArgument);
  EXPECT_THROW(World::of_gpus({.ranks = gpu_count() + 1}), InvalidArgument);
  EXPECT_THROW(World::of_gpus({.ranks = 3, .ranks_per_gpu = 2}), InvalidArgument);
  EXPECT_THROW(World::of_gpus({.ranks = 1, .ranks_per_gpu = 0}), InvalidArgument);
  WorldOptions linked{.ranks = 1};
  linked.link = EmulatedLink::parse("1GB/s,5us");
  EXPECT_THROW(World::of_gpus(linked), InvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Gpu, OwnedWorld, testing::Values(1, 2, 3, 4, 8), gpus_name);

}  // namespace
}  // namespace tandem::test
