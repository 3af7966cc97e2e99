// Independent subnetwork training (IST, arXiv 2306.16484) on a quadratic: in each round every rank
// has another part of the model and takes a step of its own on it, so memory and bytes are 1/n.
// The price is an error that no step size removes: it is known, and compared here.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

#include "tandem/tandem.h"

using namespace tandem;

int main() {
  constexpr int64_t kElements = 960;
  constexpr int kRounds = 400;
  constexpr float kStep = 0.1f;
  bool correct = true;
  WorldOptions world;
  if (!launched()) world.ranks = 4;

  run_world(world, [&](Communicator& comm) {
    const int n = comm.size();
    const Shard shard = shard_of(kElements, n, comm.rank());
    // All clients: f(x) = sum of a (x - best)^2 / 2, with curvatures a of 0.5 to 1.5.
    const auto curvature = [](int64_t i) { return 0.5f + uniform(1, 1, uint64_t(i)); };
    const auto best = [](int64_t i) { return normal(1, 2, uint64_t(i)); };

    std::vector<float> x(kElements), local(size_t(shard.count)), all(kElements);
    std::vector<int64_t> order(kElements);
    for (int round = 0; round < kRounds; ++round) {
      // A permutation that all ranks draw alike; this rank's shard of it is its subnetwork.
      std::iota(order.begin(), order.end(), 0);
      for (int64_t i = kElements - 1; i > 0; --i) {
        const auto j = int64_t(uniform(2, uint64_t(round), uint64_t(i)) * float(i + 1));
        std::swap(order[size_t(i)], order[size_t(j)]);
      }
      for (int64_t i = 0; i < shard.count; ++i) {
        const int64_t element = order[size_t(shard.begin + i)];
        // A subnetwork is scaled by n, and its gradient, too; the model is the ranks' mean.
        const float w = float(n) * x[size_t(element)];
        const float gradient = float(n) * curvature(element) * (w - best(element));
        local[size_t(i)] = (w - kStep / float(n) * gradient) / float(n);
      }
      all_gather(comm, Tensor::of(std::span(local), {shard.count}),
                 Tensor::of(std::span(all), {kElements}));
      for (int64_t i = 0; i < kElements; ++i) x[size_t(order[size_t(i)])] = all[size_t(i)];
    }

    double error = 0, norm = 0;
    for (int64_t i = 0; i < kElements; ++i) {
      error += std::pow(double(x[size_t(i)] - best(i)), 2);
      norm += std::pow(double(best(i)), 2);
    }
    const double expected = std::pow(1 - 1.0 / n, 2);
    const auto bytes = uint64_t(kRounds) * uint64_t(n - 1) * uint64_t(shard.count) * sizeof(float);
    if (std::abs(error / norm - expected) > 0.1 * expected + 1e-6) correct = false;
    if (comm.bytes_sent() != bytes) correct = false;
    if (comm.rank() == 0) {
      std::printf("%d ranks: squared error %.4f of the model's, expected (1 - 1/n)^2 = %.4f\n", n,
                  error / norm, expected);
      std::printf("a rank has %lld of %lld elements in a round and has sent %llu bytes\n",
                  static_cast<long long>(shard.count), static_cast<long long>(kElements),
                  static_cast<unsigned long long>(comm.bytes_sent()));
    }
  });
  return correct ? 0 : 1;
}
