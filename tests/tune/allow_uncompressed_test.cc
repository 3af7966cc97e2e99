// Collectives that are encoded if that is faster: all algorithms give correct results, all ranks
// use the same one, the fastest, and requests that differ by rank are detected whichever ranks have
// measured.
#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "collectives/rows/routes.h"
#include "comm/workspace.h"
#include "tandem/collectives.h"
#include "tandem/random.h"
#include "tests/comm/ranks.h"

namespace tandem::test {
namespace {

using collectives::Route;
using testing::HasSubstr;

float value_at(int rank, int64_t i) {
  return float(int32_t(philox(31, uint64_t(rank), uint64_t(i))[0])) * 0x1p-31f;
}

Memory made(int rank, int64_t first, int64_t count) {
  Memory buffer(size_t(count) * sizeof(float));
  for (int64_t i = 0; i < count; ++i) {
    reinterpret_cast<float*>(buffer.data())[i] = value_at(rank, first + i);
  }
  return buffer;
}

Tensor view(const Memory& buffer, int64_t columns = 1) {
  const auto elements = int64_t(buffer.bytes() / sizeof(float));
  return buffer.view(DType::f32, {elements / columns, columns});
}

/// Largest difference from the sum of all ranks' values.
double error_of_sum(const Tensor& sum, int64_t first, int ranks) {
  double worst = 0;
  for (int64_t i = 0; i < sum.elements(); ++i) {
    double exact = 0;
    for (int r = 0; r < ranks; ++r) exact += double(value_at(r, first + i));
    worst = std::max(worst, std::fabs(double(sum.as<float>()[i]) - exact));
  }
  return worst;
}

void expect_same_everywhere(Communicator& comm, const Tensor& result) {
  const auto all = comm.exchange({result.as<std::byte>(), result.bytes()}, "result");
  for (const auto& other : all) EXPECT_EQ(other, all[0]);
}

class AllowUncompressedCollectives : public OnRanks {};
TANDEM_INSTANTIATE(AllowUncompressedCollectives);

// A value is encoded once by one_shot, twice by two_shots.
TEST_P(AllowUncompressedCollectives, EveryAllReduceAlgorithmGivesTheSum) {
  run([](Communicator& comm) {
    if (comm.size() == 1) return;
    for (const char* text : {"int8", "int4:g32", "lossless"}) {
      const Wire wire = Wire::parse(text);
      for (const int64_t size : {1, 1000, 4097, 60001}) {
        for (const Route route : {Route::uncompressed, Route::one_shot, Route::two_shots}) {
          if (route == Route::two_shots && comm.size() == 2) continue;
          const Memory data = made(comm.rank(), 0, size);
          collectives::run_all_reduce(comm, view(data), wire, nullptr, route);
          const double once = comm.size() * wire.error_bound();
          const double encoded = route == Route::uncompressed ? 0
                                 : route == Route::one_shot   ? once
                                                              : once * (2 + wire.error_bound());
          EXPECT_LE(error_of_sum(view(data), 0, comm.size()), encoded + comm.size() * 0x1p-20)
              << text << ", " << size << ", route " << int(route);
          expect_same_everywhere(comm, view(data));
        }
      }
    }
  });
}

// The choice itself does not matter here.
TEST_P(AllowUncompressedCollectives, ResultsAreWithinTheBoundAndTheSameOnAllRanks) {
  run([](Communicator& comm) {
    const AllowUncompressed choice{Wire::parse("int8:g32")};
    const double once = comm.size() * choice.wire.error_bound();
    const double sums = 2.1 * once + comm.size() * 0x1p-20;
    for (const int64_t rows : {0, 1, 5, 700}) {
      constexpr int64_t kColumns = 96;
      const Shard local = shard_of(rows, comm.size(), comm.rank());
      for (int call = 0; call < 2; ++call) {
        const Memory data = made(comm.rank(), 0, rows * kColumns);
        Memory shard(size_t(local.count * kColumns) * sizeof(float));
        reduce_scatter(comm, view(data, kColumns), view(shard, kColumns), choice);
        EXPECT_LE(error_of_sum(view(shard), local.begin * kColumns, comm.size()), sums);
        all_reduce(comm, view(data, kColumns), choice);
        EXPECT_LE(error_of_sum(view(data), 0, comm.size()), sums);
        expect_same_everywhere(comm, view(data));
        const Memory local_shard = made(0, local.begin * kColumns, local.count * kColumns);
        Memory all(size_t(rows * kColumns) * sizeof(float));
        all_gather(comm, view(local_shard, kColumns), view(all, kColumns), choice);
        EXPECT_LE(error_of_sum(view(all), 0, 1), sums);
        expect_same_everywhere(comm, view(all));
      }
    }
  });
}

TEST_P(AllowUncompressedCollectives, OnlyTheFirstCallOfASizeMeasures) {
  run([](Communicator& comm) {
    if (comm.size() == 1) return;
    const AllowUncompressed choice{Wire::parse("int6")};
    const auto calls = [&](int64_t size) {
      const Memory data = made(comm.rank(), 0, size);
      const uint64_t before = comm.workspace().calls;
      all_reduce(comm, view(data), choice);
      return comm.workspace().calls - before;
    };
    EXPECT_GT(calls(3000), 1u);
    EXPECT_EQ(calls(3000), 1u);
    EXPECT_EQ(calls(2048), 1u);
    EXPECT_GT(calls(4096), 1u);
    for (const auto& [asked, route] : comm.workspace().routes) {
      comm.require_same("the route", asked + " " + std::to_string(route));
    }
  });
}

// A rank that measures, or has measured, blocks no other.
TEST_P(AllowUncompressedCollectives, DisagreementIsThrownOnEveryRank) {
  run([](Communicator& comm) {
    if (comm.size() == 1) return;
    const AllowUncompressed choice{Wire::parse("int5")};
    const Memory data = made(comm.rank(), 0, 9000);
    const auto refusal = [&](const std::function<void(const Tensor&)>& call, int64_t rows) {
      try {
        call(view(data).rows(0, rows));
      } catch (const Mismatch& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    };
    const auto chosen = [&](const Tensor& x) { all_reduce(comm, x, choice); };
    const auto given = [&](const Tensor& x) { all_reduce(comm, x, choice.wire); };
    const auto uncompressed = [&](const Tensor& x) { all_reduce(comm, x); };
    const bool first = comm.rank() == 0;
    EXPECT_THAT(first ? refusal(chosen, 8000) : refusal(given, 8000), HasSubstr("or uncompressed"));
    EXPECT_THAT(first ? refusal(uncompressed, 8000) : refusal(chosen, 8000),
                HasSubstr("or uncompressed"));
    EXPECT_EQ(refusal(chosen, 8000), "no error");  // and now its algorithm is known
    EXPECT_THAT(refusal(chosen, first ? 8000 : 300),
                HasSubstr("f32[300, 1] as int5 or uncompressed"));
    EXPECT_THAT(first ? refusal(chosen, 8000) : refusal(given, 8000), HasSubstr("or uncompressed"));
    EXPECT_THAT(first ? refusal(uncompressed, 8000) : refusal(chosen, 8000),
                HasSubstr("or uncompressed"));
    EXPECT_EQ(refusal(chosen, 8000), "no error");
  });
}

TEST_P(AllowUncompressedCollectives, WrongOperandsAreRefused) {
  run([](Communicator& comm) {
    const Memory data = made(0, 0, 100), integers(400);
    EXPECT_THROW(
        all_reduce(comm, integers.view(DType::i32, {100}), AllowUncompressed{Wire::parse("int8")}),
        InvalidArgument);
    EXPECT_THROW(
        all_reduce(comm, view(data).as_read_only(), AllowUncompressed{Wire::parse("int8")}),
        InvalidArgument);
    comm.barrier();
  });
}

/// Algorithm chosen for an all-reduce of `size` elements on `ranks` threads over `link`.
Route chosen_over(const char* link, int ranks, const char* format, int64_t size) {
  WorldOptions options;
  options.ranks = ranks;
  if (link) options.link = EmulatedLink::parse(link);
  Route route = Route::given;
  run_threads(options, [&](Communicator& comm) {
    const Memory data = made(comm.rank(), 0, size);
    all_reduce(comm, view(data), AllowUncompressed{Wire::parse(format)});
    ASSERT_EQ(comm.workspace().routes.size(), 1u);
    if (comm.rank() == 0) route = Route(comm.workspace().routes.begin()->second);
  });
  return route;
}

TEST(AllowUncompressed, FastestAlgorithmIsChosen) {
  TANDEM_SKIP_UNDER_MPI("needs links of known speed");
  EXPECT_EQ(chosen_over("1MB/s,10us", 2, "int8", 1 << 15), Route::one_shot);
  // Bytes decide: a contribution to three others is more than two shots of a quarter each.
  EXPECT_EQ(chosen_over("1MB/s,10us", 4, "int8", 1 << 15), Route::two_shots);
  // Latency decides.
  EXPECT_EQ(chosen_over("1GB/s,30ms", 4, "int8", 1 << 13), Route::one_shot);
  EXPECT_EQ(chosen_over(nullptr, 2, "int3:g16:asym:hadamard", 1 << 20), Route::uncompressed);
}

}  // namespace
}  // namespace tandem::test
