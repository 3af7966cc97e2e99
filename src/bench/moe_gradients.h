// Expected gradients for the benchmarks of Mixture-of-Experts layers: samples in f64, rounded where
// a bf16 layer stores them.
#pragma once

#include <algorithm>
#include <cmath>

#include "tandem/dtype.h"

namespace tandem {

/// Largest error of samples over the largest of them.
class SampledErrors {
 public:
  void add(double found, double expected) {
    const double error = std::abs(found - expected);
    worst_ = std::isfinite(found) ? std::max(worst_, error) : HUGE_VAL;
    largest_ = std::max(largest_, std::abs(expected));
  }
  double value() const { return largest_ > 0 ? worst_ / largest_ : worst_; }

 private:
  double worst_ = 0, largest_ = 0;
};

/// Forward and backward SwiGLU of one feature of an expert's inner activations, for one row.
/// `d_act_sum` is the gradient of the unweighted activation.
struct GateSample {
  GateSample(double gate_sum, double up_sum, double d_act_sum, double weight) {
    const double gate = rounded(gate_sum), up = rounded(up_sum), d_act = rounded(d_act_sum);
    const double gate_sigmoid = 1 / (1 + std::exp(-gate)), inner = gate * gate_sigmoid * up;
    dot = d_act * inner;
    scaled = rounded(weight * inner);
    dgate = rounded(weight * d_act * up * gate_sigmoid * (1 + gate * (1 - gate_sigmoid)));
    dup = rounded(weight * d_act * gate * gate_sigmoid);
  }
  double dot;         ///< this feature's contribution to the gradient of the row's weight
  double scaled;      ///< the weighted inner activation
  double dgate, dup;  ///< gradients of both sums

 private:
  static double rounded(double value) {
    return double(BFloat16::from_float(float(value)).to_float());
  }
};

}  // namespace tandem
