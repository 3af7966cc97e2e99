// Bits do not depend on the float mode of a rank's threads, which keep it.
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#include "gemm/gemm.h"
#include "tandem/collectives.h"
#include "tandem/overlap.h"
#include "tests/comm/ranks.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace tandem::test {
namespace {

constexpr uint32_t kFastMath = 0x8040, kDefault = 0x1f80;  // FTZ and DAZ; MXCSR without them
constexpr int kThreads = 3;

/// Sets MXCSR of this thread and, if it has them, of its OpenMP threads.
void set_mode(uint32_t mxcsr, bool with_team) {
  _mm_setcsr(mxcsr);
#pragma omp parallel num_threads(with_team ? kThreads : 1)
  _mm_setcsr(mxcsr);
}

/// Values whose products with each other, or sums, are subnormal.
std::vector<float> make_values(int64_t count, float scale) {
  const uint32_t mxcsr = _mm_getcsr();
  _mm_setcsr(kDefault);
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[size_t(i)] = scale * float(1 + i % 7);
  _mm_setcsr(mxcsr);
  return values;
}

int64_t subnormals(const std::vector<float>& values) {
  return std::ranges::count_if(values, [](float v) { return std::fpclassify(v) == FP_SUBNORMAL; });
}

using Results = std::vector<std::vector<float>>;

Results run_calls(Communicator& comm, Strategy strategy) {
  constexpr int64_t kM = 512, kN = 48, kK = 32;
  const Shard rows = shard_of(kM, comm.size(), comm.rank());
  auto x = make_values(kM * kK, 1e-21f), weight = make_values(kN * kK, 1e-21f);
  const Tensor all = Tensor::of(x.data(), {kM, kK}), w = Tensor::of(weight.data(), {kN, kK});
  Results results;
  const auto out = [&](int64_t count) { return results.emplace_back(size_t(count)).data(); };
  AgGemm ag(comm, {.m = kM, .n = kN, .k = kK}, {strategy, 0});
  ag.run(all.rows(rows.begin, rows.count), w, Tensor::of(out(kM * kN), {kM, kN}));
  GemmRs rs(comm, {.m = kM, .n = kN, .k = kK}, {strategy, 0});
  rs.run(all, w, Tensor::of(out(rows.count * kN), {rows.count, kN}));
  GemmAr ar(comm, {.m = kM, .n = kN, .k = kK}, {strategy, 0});
  ar.run(all, w, Tensor::of(out(kM * kN), {kM, kN}));
  results.push_back(make_values(60'000, 1e-41f));
  all_reduce(comm, Tensor::of(std::span(results.back()), {60'000}));
  results.push_back(make_values(100, 1e-41f));
  all_reduce(comm, Tensor::of(std::span(results.back()), {100}));
  return results;
}

class FloatMode : public OnRanks {};

TEST_P(FloatMode, RanksThatFlushSubnormalsGiveTheSameBits) {
  run([](Communicator& comm) {
    set_kernel_threads(kThreads);
    for (const Strategy strategy : {Strategy::serial, Strategy::overlapped}) {
      const Results expected = run_calls(comm, strategy);
      for (const auto& result : expected) EXPECT_GT(subnormals(result), 0);
      for (const bool with_team : {false, true}) {
        // The last rank's thread flushes, then its OpenMP threads do, too.
        const bool flushes = comm.rank() == comm.size() - 1;
        if (flushes) set_mode(kDefault | kFastMath, with_team);
        const Results results = run_calls(comm, strategy);
        const uint32_t mxcsr = _mm_getcsr();
        set_mode(kDefault, with_team);
        EXPECT_EQ(results, expected) << (with_team ? "with its team" : "one thread");
        EXPECT_EQ(mxcsr & kFastMath, flushes ? kFastMath : 0) << "the thread keeps its mode";
      }
    }
  });
}

TEST_P(FloatMode, ThreadsThatInheritFlushingGiveTheSameBits) {
  run([](Communicator& comm) {
    set_kernel_threads(kThreads);
    const Results expected = run_calls(comm, Strategy::serial);
    std::thread([&] {  // its OpenMP threads begin with the mode that it has then
      const bool flushes = comm.rank() == 0;
      if (flushes) set_mode(kDefault | kFastMath, true);
      _mm_setcsr(kDefault);
      set_kernel_threads(kThreads);
      EXPECT_EQ(run_calls(comm, Strategy::serial), expected);
    })
        .join();
  });
}

TANDEM_INSTANTIATE(FloatMode);

}  // namespace
}  // namespace tandem::test
#endif
