// GEMM + reduce-scatter as one call. Each rank holds some of the input features; every finished
// tile is sent to the rank that owns its rows while the next one is computed. The sum over ranks
// has a fixed order: two runs give equal bits.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "tandem/tandem.h"

using namespace tandem;

int main() {
  constexpr int64_t kM = 301, kN = 65, kK = 48;  // no divisibility is required
  bool correct = true;
  WorldOptions options;
  if (!launched()) options.ranks = 3;

  run_world(options, [&](Communicator& comm) {
    const Shard rows = shard_of(kM, comm.size(), comm.rank());
    std::vector<float> x(kM * kK), weight(kN * kK), out(size_t(rows.count * kN));
    const auto stream = [](int rank) { return 2 * uint64_t(rank); };
    for (size_t i = 0; i < x.size(); ++i) x[i] = normal(1, stream(comm.rank()), i);
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = normal(1, stream(comm.rank()) + 1, i);

    GemmRs op(comm, {.m = kM, .n = kN, .k = kK}, {.strategy = Strategy::overlapped});
    const auto run = [&] {
      op.run({x.data(), DType::f32, {kM, kK}}, {weight.data(), DType::f32, {kN, kK}},
             {out.data(), DType::f32, {rows.count, kN}});
    };
    run();
    const std::vector<float> first = out;
    run();
    if (std::memcmp(first.data(), out.data(), out.size() * sizeof(float)) != 0) correct = false;

    // One element, from every rank's inputs, in double.
    double expected = 0;
    for (int rank = 0; rank < comm.size(); ++rank) {
      for (int64_t k = 0; k < kK; ++k) {
        expected += double(normal(1, stream(rank), uint64_t(rows.begin * kK + k))) *
                    double(normal(1, stream(rank) + 1, uint64_t(k)));
      }
    }
    if (!(std::abs(double(out[0]) - expected) < 1e-4)) correct = false;
    std::printf("rank %d: rows [%lld, %lld), first element %.6f, expected %.6f\n", comm.rank(),
                static_cast<long long>(rows.begin), static_cast<long long>(rows.begin + rows.count),
                double(out[0]), expected);
  });
  return correct ? 0 : 1;
}
