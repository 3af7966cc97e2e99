// Independent subnetwork training (IST, arXiv 2306.16484) on a quadratic: in each round every rank
// has another shard of the model, takes a step of its own on it and sends each element to the rank
// that has it next. Memory is 1/n, and so are bytes. The price is an error that no step size
// removes: it is known, and compared here.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

#include "tandem/tandem.h"

using namespace tandem;

namespace {

constexpr int64_t kElements = 960;
constexpr int kRounds = 400;
constexpr float kStep = 0.1f;

/// Elements in the order in which ranks hold them, drawn alike on all ranks.
std::vector<int64_t> order_of(int round) {
  std::vector<int64_t> order(kElements);
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = kElements - 1; i > 0; --i) {
    const auto j = int64_t(uniform(2, uint64_t(round), uint64_t(i)) * float(i + 1));
    std::swap(order[size_t(i)], order[size_t(j)]);
  }
  return order;
}

/// All clients have f(x) = sum of a (x - best)^2 / 2, with curvatures a of 0.5 to 1.5.
float curvature(int64_t element) {
  return 0.5f + uniform(1, 1, uint64_t(element));
}
float best(int64_t element) {
  return normal(1, 2, uint64_t(element));
}

class Subnetwork {
 public:
  explicit Subnetwork(Communicator& comm)
      : comm_(comm),
        shard_(shard_of(kElements, comm.size(), comm.rank())),
        order_(order_of(0)),
        x_(size_t(shard_.count)) {}

  /// A step on this rank's elements. A subnetwork is scaled by n, and its gradient, too; the model
  /// is the mean of the ranks' elements, of which all but one are 0.
  void step() {
    const auto n = float(comm_.size());
    for (size_t i = 0; i < x_.size(); ++i) {
      const int64_t element = order_[size_t(shard_.begin) + i];
      const float w = n * x_[i];
      x_[i] = (w - kStep / n * n * curvature(element) * (w - best(element))) / n;
    }
  }

  /// Sends this rank's elements to those that have them in the next round.
  void move(int next_round) {
    const std::vector<int64_t> next = order_of(next_round);
    const std::vector<int> holder = ranks_of(order_), receiver = ranks_of(next);
    std::vector<float> leaving, arrived(x_.size());
    std::vector<int64_t> send_counts(size_t(comm_.size())), recv_counts(size_t(comm_.size()));
    for (int peer = 0; peer < comm_.size(); ++peer) {
      for (size_t i = 0; i < x_.size(); ++i) {
        if (receiver[size_t(order_[size_t(shard_.begin) + i])] != peer) continue;
        leaving.push_back(x_[i]);
        ++send_counts[size_t(peer)];
      }
    }
    moved_ += int64_t(x_.size()) - send_counts[size_t(comm_.rank())];
    // From each peer in its order of the elements.
    std::vector<size_t> position(kElements), to;
    for (size_t i = 0; i < next.size(); ++i) position[size_t(next[i])] = i;
    for (size_t i = 0; i < order_.size(); ++i) {
      if (receiver[size_t(order_[i])] != comm_.rank()) continue;
      to.push_back(position[size_t(order_[i])] - size_t(shard_.begin));
      ++recv_counts[size_t(holder[size_t(order_[i])])];
    }
    all_to_all(comm_, Tensor::of(std::span(leaving), {shard_.count}), send_counts,
               Tensor::of(std::span(arrived), {shard_.count}), recv_counts);
    for (size_t i = 0; i < to.size(); ++i) x_[to[i]] = arrived[i];
    order_ = next;
  }

  /// Squared distance of this rank's elements to their best values, and the squares of these.
  std::vector<float> distance() const {
    std::vector<float> sums(2);
    for (size_t i = 0; i < x_.size(); ++i) {
      const float target = best(order_[size_t(shard_.begin) + i]);
      sums[0] += (x_[i] - target) * (x_[i] - target);
      sums[1] += target * target;
    }
    return sums;
  }
  int64_t elements() const { return int64_t(x_.size()); }
  int64_t moved() const { return moved_; }

 private:
  /// Rank of each element.
  std::vector<int> ranks_of(const std::vector<int64_t>& order) const {
    std::vector<int> ranks(kElements);
    for (int rank = 0; rank < comm_.size(); ++rank) {
      const Shard shard = shard_of(kElements, comm_.size(), rank);
      for (int64_t i = shard.begin; i < shard.begin + shard.count; ++i) {
        ranks[size_t(order[size_t(i)])] = rank;
      }
    }
    return ranks;
  }

  Communicator& comm_;
  const Shard shard_;
  std::vector<int64_t> order_;
  std::vector<float> x_;  // in the order of the round
  int64_t moved_ = 0;     // elements sent to other ranks
};

}  // namespace

int main() {
  bool correct = true;
  WorldOptions world;
  if (!launched()) world.ranks = 4;

  run_world(world, [&](Communicator& comm) {
    const int n = comm.size();
    Subnetwork subnetwork(comm);
    for (int round = 0; round < kRounds; ++round) {
      subnetwork.step();
      subnetwork.move(round + 1);
    }
    const uint64_t bytes = comm.bytes_sent();
    std::vector<float> sums = subnetwork.distance();
    all_reduce(comm, Tensor::of(std::span(sums), {2}));
    const double error = double(sums[0] / sums[1]), expected = std::pow(1 - 1.0 / n, 2);
    if (std::abs(error - expected) > 0.1 * expected + 1e-6) correct = false;
    if (bytes != uint64_t(subnetwork.moved()) * sizeof(float)) correct = false;
    if (comm.rank() == 0) {
      std::printf("%d ranks: squared error %.4f of the model's, expected (1 - 1/n)^2 = %.4f\n", n,
                  error, expected);
      std::printf("a rank has %.3f of the model, and has sent %.3f of it in a round\n",
                  double(subnetwork.elements()) / kElements,
                  double(subnetwork.moved()) / kRounds / kElements);
    }
  });
  return correct ? 0 : 1;
}
