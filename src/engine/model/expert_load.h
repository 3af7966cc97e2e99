// What the routers of a step chose: how many of all ranks' tokens went to each expert, and how
// probable each was. The auxiliary loss and the routers' biases are made of it, and reports.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem {

/// Told what one router chose for this rank's rows. scores: f32 [rows, experts]; chosen: i32
/// [rows, top_k].
using RoutedRowsSeen = std::function<void(int layer, const Tensor& scores, const Tensor& chosen)>;

class ExpertLoad {
 public:
  ExpertLoad(int64_t layers, int64_t experts, RoutedRowsSeen seen = {})
      : experts_(experts), sums_(size_t(2 * layers * experts)), seen_(std::move(seen)) {}

  void clear();
  /// scores: f32 [rows, experts]; chosen: i32 [rows, top_k].
  void add(int layer, const Tensor& scores, const Tensor& chosen);
  /// Collective: adds up over `step`'s ranks.
  void share(Communicator& step);

  int64_t layers() const { return int64_t(sums_.size()) / (2 * experts_); }
  int64_t experts() const { return experts_; }
  /// Rows of `layer` by expert: top_k times the tokens in all.
  std::span<const double> counts(int layer) const;
  /// Rows of the fullest of `parts` runs of experts over the mean: of EP ranks, or of the experts.
  double imbalance(int layer, int parts) const;
  /// coefficient x experts x sum over e of f[e] x P[e]: f the share of all choices, P the mean
  /// probability (arXiv 2101.03961, equation 4). 1 x coefficient where both are even.
  double aux_loss(int layer, double coefficient, int64_t top_k) const;
  /// Its derivative by one row's probabilities.
  std::vector<float> balance(int layer, double coefficient, int64_t top_k) const;

 private:
  std::span<const double> probabilities(int layer) const;
  int64_t experts_;
  std::vector<double> sums_;  // [layer][counts, probabilities][expert]
  RoutedRowsSeen seen_;
};

}  // namespace tandem
