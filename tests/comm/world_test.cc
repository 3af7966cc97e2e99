// Worlds that outlive a callback: of threads, or under a launcher of its processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tandem/collectives.h"
#include "tandem/cuda.h"
#include "tandem/moe.h"
#include "tandem/overlap.h"
#include "tandem/world.h"

namespace tandem {
namespace {

using testing::HasSubstr;

WorldOptions options_of(int ranks, double deadline_s = 30) {
  return {.ranks = launched() ? 1 : ranks, .deadline_s = deadline_s};
}

std::vector<int> rank_counts() {
  return launched() ? std::vector{1} : std::vector{1, 2, 3, 4};
}

/// Runs `body` for each local rank, on a separate thread.
template <typename Body>
void on_ranks(const World& world, const Body& body) {
  std::vector<std::jthread> threads;
  for (const int rank : world.ranks()) {
    threads.emplace_back([&, rank] { body(world.communicator(rank)); });
  }
}

void sum_up(Communicator& comm) {
  float value = float(comm.rank() + 1);
  all_reduce(comm, Tensor::of(&value, {1}));
  EXPECT_EQ(value, float(comm.size() * (comm.size() + 1) / 2));
}

struct Product {
  static constexpr int64_t kM = 12, kN = 5, kK = 7;
  AgGemm op;
  explicit Product(Communicator& comm)
      : op(comm, {.m = kM, .n = kN, .k = kK}, {.strategy = Strategy::overlapped}) {}

  void check(int size, int rank) {
    const Shard local = shard_of(kM, size, rank);
    std::vector<float> x(size_t(local.count * kK)), w(size_t(kN * kK), 1), out(size_t(kM * kN));
    for (size_t i = 0; i < x.size(); ++i) x[i] = float(local.begin + int64_t(i) / kK);
    op.run(Tensor(x.data(), DType::f32, {local.count, kK}), Tensor(w.data(), DType::f32, {kN, kK}),
           Tensor(out.data(), DType::f32, {kM, kN}));
    for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], float(int64_t(i) / kN * kK));
  }
};

TEST(World, ItsRanksWorkTogether) {
  for (const int ranks : rank_counts()) {
    const World world(options_of(ranks));
    if (!launched()) {
      EXPECT_EQ(world.size(), ranks);
      EXPECT_EQ(int(world.ranks().size()), ranks);
    }
    for (int again = 0; again < 2; ++again) {
      on_ranks(world, [](const auto& comm) { sum_up(*comm); });
    }
  }
}

TEST(World, OperatorsOutliveTheirWorld) {
  for (const int ranks : rank_counts()) {
    std::optional<World> world(options_of(ranks));
    std::vector<std::unique_ptr<Product>> products(size_t(world->size()));
    on_ranks(*world, [&](const auto& comm) {
      products[size_t(comm->rank())] = std::make_unique<Product>(*comm);
    });
    const int size = world->size();
    const std::vector<int> local_ranks = world->ranks();
    world.reset();
    for (int again = 0; again < 2; ++again) {
      std::vector<std::jthread> threads;
      for (const int rank : local_ranks) {
        threads.emplace_back([&, rank] { products[size_t(rank)]->check(size, rank); });
      }
    }
  }
}

TEST(World, MoeLayerOutlivesItsWorld) {
  for (const int ranks : rank_counts()) {
    if (ranks > 2) continue;
    std::optional<World> world(options_of(ranks));
    const int size = world->size();
    const std::vector<int> local_ranks = world->ranks();
    std::vector<std::unique_ptr<MoeLayer>> layers(local_ranks.size());
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < local_ranks.size(); ++i) {
      threads.emplace_back([&, i, comm = world->communicator(local_ranks[i])] {
        layers[i] = std::make_unique<MoeLayer>(
            *comm, MoeShape{.tokens = 1, .hidden = 1, .ffn = size, .experts = size},
            MoeOptions{.strategy = Strategy::serial});
      });
    }
    threads.clear();
    world.reset();
    for (size_t i = 0; i < local_ranks.size(); ++i) {
      threads.emplace_back([&layer = *layers[i], rank = local_ranks[i], size] {
        std::vector<float> w_in(size_t(2 * size), 0), w_out(size_t(size), 1);
        float x = 1, out = 7, weight = 1;
        int expert = (rank + 1) % size;
        MoeBatch batch;
        layer.forward(Tensor::of(&x, {1, 1}),
                      {Tensor(&expert, DType::i32, {1, 1}), Tensor::of(&weight, {1, 1})},
                      Tensor::of(w_in.data(), {2 * size, 1}), Tensor::of(w_out.data(), {1, size}),
                      Tensor::of(&out, {1, 1}), batch);
        EXPECT_EQ(out, 0);
      });
    }
  }
}

TEST(World, RanksMayDestroyOperatorsInAnyOrder) {
  for (const int ranks : rank_counts()) {
    const World world(options_of(ranks));
    on_ranks(world, [](std::shared_ptr<Communicator> comm) {
      const int size = comm->size(), rank = comm->rank();
      auto first = std::make_unique<Product>(*comm), second = std::make_unique<Product>(*comm);
      auto product = std::make_unique<Product>(*comm);
      comm.reset();
      first->check(size, rank);
      second->check(size, rank);
      (rank % 2 ? first : second).reset();
      product->check(size, rank);
      (rank % 2 ? second : first).reset();
      product->check(size, rank);
    });
  }
}

TEST(World, SplitsAndTheWorldMayBeUsedInTurn) {
  for (const int ranks : rank_counts()) {
    const World world(options_of(ranks));
    on_ranks(world, [](const auto& comm) {
      const auto group = comm->split(comm->rank() % 2, 0);
      sum_up(*group);
      sum_up(*comm);
    });
  }
}

TEST(World, MayEndDuringTransfers) {
  if (launched()) GTEST_SKIP() << "threads only: an emulated link";
  WorldOptions options = options_of(2);
  options.link = EmulatedLink::parse("1MB/s,50ms");
  const World world(options);
  on_ranks(world, [](const auto& comm) {
    const auto buffer = comm->allocate(1 << 16, 1);
    static const std::vector<std::byte> source(1 << 16);
    comm->put(1 - comm->rank(), *buffer, 0, source.data(), source.size(), 0, 1);
  });
}

TEST(World, RankOfAnotherProcessIsRefused) {
  const World world(options_of(2));
  for (const int rank : {-1, world.size()}) {
    try {
      world.communicator(rank);
      FAIL();
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(rank)));
    }
  }
  if (world.ranks().size() > 1) {
    EXPECT_THROW(world.communicator(), InvalidArgument);
  } else {
    EXPECT_EQ(world.communicator()->rank(), world.ranks()[0]);
  }
}

TEST(World, SeveralWorldsOfThreadsMayCoexist) {
  const World first = World::of_threads({.ranks = 2}), second = World::of_threads({.ranks = 3});
  on_ranks(first, [](const auto& comm) { sum_up(*comm); });
  on_ranks(second, [](const auto& comm) { sum_up(*comm); });
  EXPECT_THROW(World::of_threads({.ranks = 0}), InvalidArgument);
}

TEST(World, OnlyOneWorldOfProcessesMayExist) {
  if (!launched()) {
    EXPECT_THROW(World::adopt_mpi(0), Error);  // MPI is not initialized, or this build has none
    return;
  }
  {
    const World world;
    EXPECT_THROW(World(), InvalidArgument);
    EXPECT_THROW(run_world({}, [](Communicator&) {}), InvalidArgument);
    sum_up(*world.communicator());
  }
  EXPECT_THROW(World({.ranks = 99}), InvalidArgument);
  const World next;
  sum_up(*next.communicator());
}

TEST(World, OfGpusIsRefusedByNameWithoutAGpu) {
  if (gpu_count() > 0) GTEST_SKIP() << "this machine has a GPU: tests/gpu";
  for (const int ranks_per_gpu : {1, 2}) {
    try {
      World::of_gpus({.ranks = 2, .ranks_per_gpu = ranks_per_gpu});
      ADD_FAILURE() << "no error";
    } catch (const Unsupported& error) {
      EXPECT_THAT(error.what(), HasSubstr("nccl transport: "));
    }
  }
}

TEST(World, AdoptNcclIsRefusedByNameWithoutAGpu) {
  if (gpu_count() > 0) GTEST_SKIP() << "this machine has a GPU: tests/gpu";
  try {
    World::adopt_nccl(nullptr, nullptr);
    ADD_FAILURE() << "no error";
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), testing::AnyOf(HasSubstr("adopt_nccl: this build has no CUDA"),
                                             HasSubstr("no GPU")));
  }
}

TEST(World, GpuGuardIsRefusedOnCpuRanks) {
  const World world = World::of_threads({.ranks = 2});
  try {
    const GpuGuard guard(*world.communicator(1));
    ADD_FAILURE() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("transport threads: expected nccl"));
  }
}

TEST(World, ExceptionThatDestroysTheWorldEndsWaits) {
  if (launched()) GTEST_SKIP() << "threads only: ends its world";
  std::shared_ptr<Communicator> left;
  try {
    const World world(options_of(2));
    left = world.communicator(1);
    throw std::logic_error("elsewhere");
  } catch (const std::logic_error&) {
    EXPECT_THROW(left->barrier(), Aborted);
  }
}

TEST(World, AbortEndsItsWaits) {
  if (launched()) GTEST_SKIP() << "threads only: ends its world";
  const World world(options_of(2));
  std::jthread waiter([&] { EXPECT_THROW(world.communicator(1)->barrier(), Aborted); });
  world.abort("enough");
}

/// Gathers bytes of ranks that are threads of this process.
class Meeting {
 public:
  explicit Meeting(int size) : blobs_(size_t(size)), arrived_(size) {}
  World::Gather of(int rank) {
    return [this, rank](std::span<const std::byte> local) {
      blobs_[size_t(rank)].assign(local.begin(), local.end());
      arrived_.arrive_and_wait();
      std::vector<std::byte> all;
      for (const auto& blob : blobs_) all.insert(all.end(), blob.begin(), blob.end());
      arrived_.arrive_and_wait();
      return all;
    };
  }

 private:
  std::vector<std::vector<std::byte>> blobs_;
  std::barrier<> arrived_;
};

/// Calls `body(rank, meeting)` on `size` threads.
template <typename Body>
void on_members(int size, const Body& body) {
  Meeting meeting(size);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { body(rank, meeting); });
  }
}

TEST(World, MembersOfACallersGroupConnect) {
  for (const int size : {1, 2, 3}) {
    on_members(size, [size](int rank, Meeting& meeting) {
      const int last = size - 1 - rank;
      const World first = World::connect(rank, size, meeting.of(rank), {.deadline_s = 30});
      const World reversed = World::connect(last, size, meeting.of(last), {.deadline_s = 30});
      EXPECT_EQ(first.size(), size);
      EXPECT_EQ(first.ranks(), std::vector{rank});
      const auto comm = first.communicator(), other = reversed.communicator();
      EXPECT_EQ(other->rank(), last);
      for (const auto& each : {comm, other, comm}) {
        sum_up(*each);
        Product(*each).check(size, each->rank());
      }
    });
  }
}

TEST(World, MembersThatCannotConnectAreNamedOnAllRanks) {
  on_members(2, [](int rank, Meeting& meeting) {
    const auto message = [&](const WorldOptions& options) -> std::string {
      try {
        World::connect(rank, 2, meeting.of(rank), options);
      } catch (const InvalidArgument& error) {
        return error.what();
      }
      return "connected";
    };
    EXPECT_THAT(message({.ranks = rank == 1 ? 3 : 1, .deadline_s = 30}),
                HasSubstr(rank == 1 ? "connect: ranks 3" : "connect: rank 1: ranks 3"));
    EXPECT_THAT(message({.deadline_s = 30, .ranks_per_gpu = rank == 0 ? 2 : 1}),
                HasSubstr("2 ranks a GPU: expected 1"));
  });
}

thread_local bool asked_to_stop = false;

TEST(World, WaitCheckInterruptsAWait) {
  if (launched()) GTEST_SKIP() << "threads only: ends its world";
  const World world(options_of(2));
  set_wait_check([] {
    if (asked_to_stop) throw Interrupted("stop");
  });
  std::jthread([&] {
    asked_to_stop = true;
    EXPECT_THROW(world.communicator(0)->barrier(), Interrupted);
  }).join();
  EXPECT_THROW(world.communicator(1)->barrier(), Aborted);
  set_wait_check(nullptr);
}

}  // namespace
}  // namespace tandem
