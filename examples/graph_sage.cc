// GraphSAGE on a graph that is divided among ranks, which send each other only some features of
// their boundary nodes: few at first, all at the end (VARCO, arXiv 2406.17611). The exchange is two
// all_to_all: rows forward, their gradients back. examples/python/graph_sage.py trains on a real
// graph.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

#include "tandem/tandem.h"

using namespace tandem;

namespace {

constexpr int64_t kNodes = 320, kFeatures = 16, kClasses = 4;
constexpr int64_t kWeights = kFeatures * kFeatures;
constexpr int kSteps = 60;
constexpr float kMaxRatio = 16, kRate = 2;

int64_t class_of(int64_t node) {
  return node % kClasses;
}

/// Nodes of a class have more edges to each other than to others.
bool has_edge(int64_t a, int64_t b) {
  const float chance = class_of(a) == class_of(b) ? 0.08f : 0.01f;
  return a != b && uniform(1, uint64_t(std::min(a, b)), uint64_t(std::max(a, b))) < chance;
}

/// Says little about the node's class: its neighbours' features together do.
float feature(int64_t node, int64_t column) {
  return normal(2, uint64_t(node), uint64_t(column)) +
         0.4f * normal(3, uint64_t(class_of(node)), uint64_t(column));
}

/// Nodes of a rank, and the neighbours of these on others, its halo.
struct Partition {
  Partition(int ranks, int rank)
      : nodes(shard_of(kNodes, ranks, rank)),
        send_counts(size_t(ranks)),
        recv_counts(size_t(ranks)) {
    for (int peer = 0; peer < ranks; ++peer) {
      const Shard remote = shard_of(kNodes, ranks, peer);
      if (peer == rank) continue;
      add_boundary(nodes, remote, sent, send_counts[size_t(peer)]);
      add_boundary(remote, nodes, halo, recv_counts[size_t(peer)]);
    }
  }

  /// Adds the nodes of `from` that have an edge into `into`.
  static void add_boundary(Shard from, Shard into, std::vector<int64_t>& nodes, int64_t& count) {
    for (int64_t node = from.begin; node < from.begin + from.count; ++node) {
      bool borders = false;
      for (int64_t other = into.begin; other < into.begin + into.count; ++other) {
        borders |= has_edge(node, other);
      }
      if (borders) nodes.push_back(node);
      count += borders;
    }
  }

  Shard nodes;
  std::vector<int64_t> sent, halo;  // by peer
  std::vector<int64_t> send_counts, recv_counts;
};

using Matrix = std::vector<float>;  // [rows, kFeatures], kClasses being fewer

/// A hidden layer and the output's: each adds a product of a node's row and one of its neighbours'
/// mean.
struct Model {
  Matrix weight[2] = {Matrix(kWeights), Matrix(kWeights)};
  Matrix mean[2] = {Matrix(kWeights), Matrix(kWeights)};
};

class GraphSage {
 public:
  GraphSage(Communicator& comm, float max_ratio)
      : comm_(comm), partition_(comm.size(), comm.rank()), max_ratio_(max_ratio) {
    for (int layer = 0; layer < 2; ++layer) {
      for (size_t i = 0; i < model_.weight[layer].size(); ++i) {
        model_.weight[layer][i] = 0.25f * normal(4, uint64_t(layer), i);
        model_.mean[layer][i] = 0.25f * normal(5, uint64_t(layer), i);
      }
    }
  }

  /// One step over all ranks. Returns the loss before it.
  double step(int number) {
    const Matrix x = rows_of(partition_.nodes);
    const std::vector<int64_t> columns = columns_at(number);
    const Matrix mean_x = mean(x, columns);
    Matrix hidden = product(x, model_.weight[0]);
    add(hidden, product(mean_x, model_.mean[0]));
    for (float& v : hidden) v = std::max(v, 0.f);
    const Matrix mean_hidden = mean(hidden, columns);
    Matrix logits = product(hidden, model_.weight[1]);
    add(logits, product(mean_hidden, model_.mean[1]));

    double loss = 0;
    const Matrix dlogits = loss_gradient(logits, loss);
    Matrix dhidden = product(dlogits, model_.weight[1], true);
    add(dhidden, mean_backward(product(dlogits, model_.mean[1], true), columns));
    for (size_t i = 0; i < hidden.size(); ++i) dhidden[i] *= float(hidden[i] > 0);
    update(model_.weight[1], hidden, dlogits);
    update(model_.mean[1], mean_hidden, dlogits);
    update(model_.weight[0], x, dhidden);
    update(model_.mean[0], mean_x, dhidden);
    float sum = float(loss);
    all_reduce(comm_, {&sum, DType::f32, {1}});
    return sum;
  }

  const Matrix& gradient() const { return gradient_; }
  uint64_t boundary_bytes() const { return bytes_; }
  uint64_t expected_bytes() const { return expected_bytes_; }

 private:
  /// Columns sent in a step, drawn alike on all ranks: 1 in max_ratio at first, all from two thirds
  /// of the steps on.
  std::vector<int64_t> columns_at(int step) const {
    const float ratio =
        std::max(1.f, max_ratio_ - 1.5f * (max_ratio_ - 1) * float(step) / float(kSteps));
    std::vector<int64_t> columns(kFeatures);
    std::iota(columns.begin(), columns.end(), 0);
    for (int64_t i = kFeatures - 1; i > 0; --i) {
      const auto j = int64_t(uniform(6, uint64_t(step), uint64_t(i)) * float(i + 1));
      std::swap(columns[size_t(i)], columns[size_t(j)]);
    }
    columns.resize(size_t(std::lround(float(kFeatures) / ratio)));
    return columns;
  }

  static Matrix rows_of(Shard nodes) {
    Matrix rows(size_t(nodes.count * kFeatures));
    for (int64_t i = 0; i < nodes.count * kFeatures; ++i) {
      rows[size_t(i)] = feature(nodes.begin + i / kFeatures, i % kFeatures);
    }
    return rows;
  }

  /// Sends rows of so many columns to those peers, and returns what arrives.
  Matrix exchange(const Matrix& rows, size_t columns, const std::vector<int64_t>& send,
                  const std::vector<int64_t>& recv) {
    const int64_t sent = std::accumulate(send.begin(), send.end(), int64_t(0));
    const int64_t received = std::accumulate(recv.begin(), recv.end(), int64_t(0));
    Matrix arrived(size_t(received) * columns);
    const uint64_t before = comm_.bytes_sent();
    all_to_all(comm_, {rows.data(), DType::f32, {sent, int64_t(columns)}}, send,
               {arrived.data(), DType::f32, {received, int64_t(columns)}}, recv);
    bytes_ += comm_.bytes_sent() - before;
    expected_bytes_ += uint64_t(sent) * columns * sizeof(float);
    return arrived;
  }

  /// Mean of each local node's neighbours, of which those in the halo have only some columns.
  Matrix mean(const Matrix& rows, const std::vector<int64_t>& columns) {
    Matrix packed;
    for (const int64_t node : partition_.sent) {
      for (const int64_t c : columns) {
        packed.push_back(rows[size_t((node - partition_.nodes.begin) * kFeatures + c)]);
      }
    }
    const Matrix halo =
        exchange(packed, columns.size(), partition_.send_counts, partition_.recv_counts);
    Matrix out(rows.size());
    for (int64_t i = 0; i < partition_.nodes.count; ++i) {
      float* const row = &out[size_t(i * kFeatures)];
      const float scale = 1 / float(degree(partition_.nodes.begin + i));
      for (int64_t j = 0; j < partition_.nodes.count; ++j) {
        if (!has_edge(partition_.nodes.begin + i, partition_.nodes.begin + j)) continue;
        for (int64_t c = 0; c < kFeatures; ++c) row[c] += scale * rows[size_t(j * kFeatures + c)];
      }
      for (size_t j = 0; j < partition_.halo.size(); ++j) {
        if (!has_edge(partition_.nodes.begin + i, partition_.halo[j])) continue;
        for (size_t c = 0; c < columns.size(); ++c) {
          row[columns[c]] += scale * halo[j * columns.size() + c];
        }
      }
    }
    return out;
  }

  /// Gradient of the rows that `mean` read, here and on other ranks.
  Matrix mean_backward(const Matrix& dout, const std::vector<int64_t>& columns) {
    Matrix dhalo(partition_.halo.size() * columns.size()), down(dout.size());
    for (int64_t i = 0; i < partition_.nodes.count; ++i) {
      const float* const row = &dout[size_t(i * kFeatures)];
      const float scale = 1 / float(degree(partition_.nodes.begin + i));
      for (int64_t j = 0; j < partition_.nodes.count; ++j) {
        if (!has_edge(partition_.nodes.begin + i, partition_.nodes.begin + j)) continue;
        for (int64_t c = 0; c < kFeatures; ++c) down[size_t(j * kFeatures + c)] += scale * row[c];
      }
      for (size_t j = 0; j < partition_.halo.size(); ++j) {
        if (!has_edge(partition_.nodes.begin + i, partition_.halo[j])) continue;
        for (size_t c = 0; c < columns.size(); ++c) {
          dhalo[j * columns.size() + c] += scale * row[columns[c]];
        }
      }
    }
    const Matrix back =
        exchange(dhalo, columns.size(), partition_.recv_counts, partition_.send_counts);
    for (size_t i = 0; i < partition_.sent.size(); ++i) {
      const int64_t row = partition_.sent[i] - partition_.nodes.begin;
      for (size_t c = 0; c < columns.size(); ++c) {
        down[size_t(row * kFeatures + columns[c])] += back[i * columns.size() + c];
      }
    }
    return down;
  }

  static int64_t degree(int64_t node) {
    int64_t degree = 0;
    for (int64_t other = 0; other < kNodes; ++other) degree += has_edge(node, other);
    return std::max<int64_t>(degree, 1);
  }

  static Matrix product(const Matrix& rows, const Matrix& weight, bool transposed = false) {
    Matrix out(rows.size());
    for (size_t i = 0; i < rows.size(); i += kFeatures) {
      for (int64_t k = 0; k < kFeatures; ++k) {
        for (int64_t j = 0; j < kFeatures; ++j) {
          const int64_t at = transposed ? j * kFeatures + k : k * kFeatures + j;
          out[i + size_t(j)] += rows[i + size_t(k)] * weight[size_t(at)];
        }
      }
    }
    return out;
  }

  static void add(Matrix& to, const Matrix& from) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
  }

  /// Softmax and cross entropy of the first kClasses columns, a mean over all ranks' nodes.
  Matrix loss_gradient(const Matrix& logits, double& loss) const {
    Matrix gradient(logits.size());
    for (int64_t i = 0; i < partition_.nodes.count; ++i) {
      const float* const row = &logits[size_t(i * kFeatures)];
      double sum = 0;
      for (int64_t c = 0; c < kClasses; ++c) sum += std::exp(double(row[c]));
      const int64_t label = class_of(partition_.nodes.begin + i);
      loss += (std::log(sum) - double(row[label])) / kNodes;
      for (int64_t c = 0; c < kClasses; ++c) {
        const double probability = std::exp(double(row[c])) / sum;
        gradient[size_t(i * kFeatures + c)] = float((probability - (c == label)) / kNodes);
      }
    }
    return gradient;
  }

  /// Sums the weight's gradient over the ranks and takes a step.
  void update(Matrix& weight, const Matrix& rows, const Matrix& dout) {
    Matrix gradient(weight.size());
    for (size_t i = 0; i < rows.size(); i += kFeatures) {
      for (size_t k = 0; k < kFeatures; ++k) {
        for (size_t j = 0; j < kFeatures; ++j) {
          gradient[k * kFeatures + j] += rows[i + k] * dout[i + j];
        }
      }
    }
    all_reduce(comm_, {gradient.data(), DType::f32, {int64_t(gradient.size())}});
    for (size_t i = 0; i < weight.size(); ++i) weight[i] -= kRate * gradient[i];
    gradient_.insert(gradient_.end(), gradient.begin(), gradient.end());
  }

  Communicator& comm_;
  Partition partition_;
  float max_ratio_;
  Model model_;
  Matrix gradient_;  // of all steps
  uint64_t bytes_ = 0, expected_bytes_ = 0;
};

}  // namespace

int main() {
  bool correct = true;
  WorldOptions world;
  if (!launched()) world.ranks = 4;
  run_world(world, [&](Communicator& comm) {
    // With all columns the first step's gradients are those of the whole graph on one rank.
    const auto alone = comm.split(comm.rank(), 0);
    GraphSage whole(*alone, 1), divided(comm, 1);
    whole.step(0);
    divided.step(0);
    float error = 0, largest = 0;
    for (size_t i = 0; i < whole.gradient().size(); ++i) {
      error = std::max(error, std::abs(divided.gradient()[i] - whole.gradient()[i]));
      largest = std::max(largest, std::abs(whole.gradient()[i]));
    }
    if (!(error < 1e-5f * largest)) correct = false;

    GraphSage full(comm, 1), varco(comm, kMaxRatio);
    double loss[2] = {};
    for (int step = 0; step < kSteps; ++step) {
      loss[0] = full.step(step);
      loss[1] = varco.step(step);
    }
    const double share = full.boundary_bytes() == 0
                             ? 1.0
                             : double(varco.boundary_bytes()) / double(full.boundary_bytes());
    if (varco.boundary_bytes() != varco.expected_bytes()) correct = false;
    if (!(loss[1] < 1.1 * loss[0])) correct = false;
    if (comm.rank() == 0) {
      std::printf("gradients against one rank: largest difference %.1e of %.1e\n", double(error),
                  double(largest));
      std::printf("loss after %d steps: %.4f with all features, %.4f with %.0f %% of the bytes\n",
                  kSteps, loss[0], loss[1], 100 * share);
    }
  });
  return correct ? 0 : 1;
}
