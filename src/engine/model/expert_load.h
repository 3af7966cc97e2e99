// Expert load of a step: tokens of all ranks per expert and the router's probabilities, from which
// the auxiliary loss, the router biases and reports are computed.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem {

/// Callback with one router's choices for this rank's rows. scores: f32 [rows, experts]; chosen:
/// i32 [rows, top_k].
using RoutedRowsSeen = std::function<void(int layer, const Tensor& scores, const Tensor& chosen)>;

class ExpertLoad {
 public:
  ExpertLoad(int64_t layers, int64_t experts, RoutedRowsSeen seen = {})
      : experts_(experts), sums_(size_t(2 * layers * experts)), seen_(std::move(seen)) {}

  void clear();
  /// scores: f32 [rows, experts]; chosen: i32 [rows, top_k].
  void add(int layer, const Tensor& scores, const Tensor& chosen);
  /// Adds the counts of the same layers and experts.
  void add(const ExpertLoad& other);
  /// Sums over the ranks of `axes`, along each in turn. Collective.
  void share(const std::vector<Communicator*>& axes);

  int64_t layers() const { return int64_t(sums_.size()) / (2 * experts_); }
  int64_t experts() const { return experts_; }
  /// Rows per expert in `layer`; they sum to top_k times the tokens.
  std::span<const double> counts(int layer) const;
  /// Max over mean of the rows of `parts` contiguous ranges of experts (EP ranks, or single
  /// experts).
  double imbalance(int layer, int parts) const;
  /// coefficient x experts x sum over e of f[e] x P[e]: f the fraction of all choices, P the mean
  /// probability (arXiv 2101.03961, equation 4). 1 x coefficient if both are even.
  double aux_loss(int layer, double coefficient, int64_t top_k) const;
  /// Sum over the layers.
  double aux_loss(double coefficient, int64_t top_k) const;
  /// Derivative of aux_loss with respect to one row's probabilities.
  std::vector<float> balance(int layer, double coefficient, int64_t top_k) const;

 private:
  std::span<const double> probabilities(int layer) const;
  int64_t experts_;
  std::vector<double> sums_;  // [layer][counts, probabilities][expert]
  RoutedRowsSeen seen_;
};

}  // namespace tandem
