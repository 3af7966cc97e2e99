// A call that fails half-way on one rank, after it has advanced its epochs: out of memory or at a
// deadline. No later call may be mistaken for it: that rank refuses further calls, and the others'
// waits end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "gemm/gemm.h"
#include "tandem/moe.h"
#include "tandem/overlap.h"
#include "tests/overlap/failing_new.h"

namespace tandem::test {
namespace {

using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

WorldOptions extend_deadline(int ranks) {
  WorldOptions options;
  options.ranks = ranks;
  options.deadline_s = 30;
  return options;
}

constexpr int64_t kM = 24, kN = 6, kK = 4;

// One rank's operands, all ones.
struct Operands {
  std::vector<float> x, weight, out;
  Operands() : x(kM * kK, 1), weight(kN * kK, 1), out(kM * kN, 1) {}
  static Tensor matrix(std::vector<float>& memory, int64_t rows, int64_t columns) {
    return Tensor(memory.data(), DType::f32, {rows, columns});
  }
};
// A call that fails on one rank, and its result, every element of which should be `expected`.
struct Attempt {
  std::function<void()> call;
  Tensor result;
  float expected;
  bool is_right() const {
    const float* values = result.as<float>();
    return std::all_of(values, values + result.elements(),
                       [this](float value) { return value == expected; });
  }
};
using MakeAttempt = std::function<Attempt(Communicator&, Operands&)>;
constexpr int kRanks = 3, kFailing = 2;

template <typename Op>
MakeAttempt runs(Strategy strategy) {
  return [strategy](Communicator& comm, Operands& o) -> Attempt {
    auto op =
        std::make_shared<Op>(comm, typename Op::Shape{kM, kN, kK}, OverlapOptions{strategy, 0});
    const int64_t local = shard_of(kM, comm.size(), comm.rank()).count;
    const Tensor x = o.matrix(o.x, kM, kK), weight = o.matrix(o.weight, kN, kK),
                 out = o.matrix(o.out, kM, kN);
    if constexpr (std::is_same_v<Op, AgGemm>) {
      return {[=] { op->run(x.rows(0, local), weight, out); }, out, kK};
    } else if constexpr (std::is_same_v<Op, GemmRs>) {
      return {[=] { op->run(x, weight, out.rows(0, local)); }, out.rows(0, local), kRanks * kK};
    } else if constexpr (std::is_same_v<Op, GemmAr>) {
      return {[=] { op->run(x, weight, out); }, out, kRanks * kK};
    } else {
      return {[=] { op->run(x.rows(0, local), out, weight); }, weight, 1 + kM};
    }
  };
}

// The last rank runs out of memory and calls again. The others get the correct result or an Aborted
// error, and later calls succeed on no rank.
void expect_ended_everywhere(const MakeAttempt& make) {
  const auto begin = Clock::now();
  const auto expect_aborted = [](const auto& call) {
    try {
      call();
      return false;
    } catch (const Aborted& error) {
      EXPECT_EQ(error.origin, kFailing) << error.what();
    }
    return true;
  };
  try {
    run_threads(extend_deadline(kRanks), [&](Communicator& comm) {
      set_kernel_threads(1);
      Operands operands;
      const Attempt attempt = make(comm, operands);
      comm.barrier();
      if (comm.rank() == kFailing) {
        fail_next_allocation();
        EXPECT_THROW(attempt.call(), std::exception);
        EXPECT_FALSE(allocation_will_fail());
      } else if (!expect_aborted(attempt.call)) {
        EXPECT_TRUE(attempt.is_right()) << "rank " << comm.rank();
      }
      EXPECT_TRUE(expect_aborted(attempt.call)) << "rank " << comm.rank();
    });
  } catch (const Aborted& error) {
    EXPECT_EQ(error.origin, kFailing) << error.what();
  }
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20));
}

class FailingOperator : public testing::TestWithParam<Strategy> {};

TEST_P(FailingOperator, EndsTheCallOnAllRanks) {
  expect_ended_everywhere(runs<AgGemm>(GetParam()));
  expect_ended_everywhere(runs<GemmRs>(GetParam()));
  expect_ended_everywhere(runs<GemmAr>(GetParam()));
  expect_ended_everywhere(runs<AgWgrad>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Strategies, FailingOperator,
                         testing::Values(Strategy::serial, Strategy::overlapped));

TEST(FailingCollective, EndsTheCallOnAllRanks) {
  expect_ended_everywhere([](Communicator& comm, Operands& o) -> Attempt {
    const Tensor data = o.matrix(o.out, kM, kN);
    return {[&comm, data] { all_reduce(comm, data); }, data, kRanks};
  });
  expect_ended_everywhere([](Communicator& comm, Operands& o) -> Attempt {
    const Tensor data = o.matrix(o.out, kM, kN),
                 shard = o.matrix(o.x, shard_of(kM, comm.size(), comm.rank()).count, kN);
    return {[&comm, data, shard] { reduce_scatter(comm, data, shard); }, shard, kRanks};
  });
  expect_ended_everywhere([](Communicator& comm, Operands& o) -> Attempt {
    const std::vector<int64_t> counts(kRanks, 1);
    const Tensor from = o.matrix(o.out, kRanks, kN), to = o.matrix(o.x, kRanks, kN);
    return {[&comm, counts, from, to] { all_to_all(comm, from, counts, to, counts); }, to, 1};
  });
}

// A batch's memory is agreed on: all ranks name the one without, and the layer remains usable.
TEST(FailingBatch, IsNamedByAllRanks) {
  run_threads(extend_deadline(kRanks), [&](Communicator& comm) {
    MoeLayer layer(comm, {8, 16, 8, 2 * kRanks, 2, 1, DType::f32}, {Strategy::serial});
    MoeBatch batch;
    if (comm.rank() == kFailing) fail_next_allocation();
    try {
      layer.prepare(batch);
      ADD_FAILURE() << "rank " << comm.rank();
    } catch (const IoError& error) {
      EXPECT_STREQ(error.what(), "rank 2: moe: memory of a batch: not enough memory");
    }
    layer.prepare(batch);
    EXPECT_GT(batch.bytes(), 0u);
  });
}

// Rank 0 times out waiting for rank 1, and calls again when rank 1 arrives.
void expect_refused_after_timeout(const std::function<void(Communicator&)>& first,
                                  const std::function<void(Communicator&)>& second,
                                  const std::function<void(Communicator&)>& late) {
  std::atomic<bool> over = false;
  run_threads(extend_deadline(2), [&](Communicator& comm) {
    comm.barrier();
    if (comm.rank() == 1) {
      while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      comm.set_deadline(0.2);
      late(comm);
      return;
    }
    comm.set_deadline(0.1);
    EXPECT_THROW(first(comm), Timeout);
    try {
      second(comm);
      ADD_FAILURE() << "a call after one that failed";
    } catch (const Aborted& error) {
      EXPECT_EQ(error.origin, 0);
      EXPECT_THAT(error.what(), HasSubstr("a call before this one failed"));
    }
    over = true;
  });
}

TEST(TimedOut, NoCallFollowsATimedOutOne) {
  const auto reduces = [](Communicator& comm) {
    std::vector<float> data(40);
    all_reduce(comm, Tensor::of(std::span(data), {40}));
  };
  const auto broadcasts = [](Communicator& comm) {
    std::vector<float> data(40);
    broadcast(comm, Tensor::of(std::span(data), {40}), 1);
  };
  // Data that rank 0 sent earlier has arrived: rank 1 matches it with the first call.
  expect_refused_after_timeout(reduces, broadcasts, reduces);
  const auto barrier = [](Communicator& comm) { comm.barrier("step"); };
  expect_refused_after_timeout(barrier, barrier, barrier);
}

TEST(TimedOut, NoMessageFollowsATruncatedOne) {
  // More chunks than the receiver has room for.
  const std::vector<float> data(size_t(8) << 20);
  const auto sends = [&](int64_t count) {
    return [&data, count](Communicator& comm) {
      send(comm, Tensor(data.data(), DType::f32, {count}), 1);
    };
  };
  expect_refused_after_timeout(sends(int64_t(data.size())), sends(1), [](Communicator& comm) {
    std::vector<float> one(1);
    EXPECT_THROW(recv(comm, Tensor::of(std::span(one), {1}), 0), Error);
  });
}

// A message of which nothing was sent yet may be retried.
TEST(TimedOut, MessageThatWasLateMayBeReceivedAgain) {
  std::atomic<bool> over = false;
  run_threads(extend_deadline(2), [&](Communicator& comm) {
    std::vector<float> data(3, float(comm.rank()));
    const Tensor tensor = Tensor::of(std::span(data), {3});
    if (comm.rank() == 1) {
      while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return send(comm, tensor, 0);
    }
    comm.set_deadline(0.1);
    EXPECT_THROW(recv(comm, tensor, 1), Timeout);
    over = true;
    comm.set_deadline(30);
    recv(comm, tensor, 1);
    EXPECT_EQ(data[2], 1);
  });
}

}  // namespace
}  // namespace tandem::test
