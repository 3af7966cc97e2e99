// Trust ratios (LAMB, arXiv 1904.00962) of tensors that are sharded over ranks.
#pragma once

#include <vector>

#include "tandem/communicator.h"

namespace tandem {

/// |w| / |direction| from their squares; 1 if one of them is 0.
double trust_ratio(double weight_squares, double direction_squares);

class TrustRatios {
 public:
  /// `axes`: communicators whose ranks together are the world; must outlive this object.
  TrustRatios(std::vector<Communicator*> axes, size_t num_tensors);

  /// Adds the squares of a slice of a tensor. Ranks that hold the same slice may all add it: both
  /// norms grow alike.
  void add(size_t tensor, double weight_squares, double direction_squares);
  /// Sums what all ranks added since the last call, in rank order along each axis, so that all
  /// ranks have the same bits. Collective.
  void reduce();
  double of(size_t tensor) const { return ratios_[tensor]; }

 private:
  std::vector<Communicator*> axes_;
  std::vector<double> squares_;  // of the weights of all tensors, then of their directions
  std::vector<double> ratios_;
};

}  // namespace tandem
