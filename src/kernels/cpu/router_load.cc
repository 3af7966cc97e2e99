#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/cpu/kernels.h"

namespace tandem::cpu {
namespace {

constexpr double kProbabilityUnits = double(1 << 28);

double total_rows(const double* counts, int64_t experts) {
  return std::accumulate(counts, counts + experts, 0.0);
}

float expert_balance(const AuxLoss& loss, double count, double all) {
  return float(loss.coefficient * double(loss.experts) * count / all * double(loss.top_k) / all);
}

}  // namespace

void add_router_load(const Tensor& scores, const Tensor& chosen, const Tensor& load) {
  const int64_t experts = scores.dim(1);
  auto* const counts = load.as<double>();
  double* const probabilities = counts + experts;
  for (int64_t i = 0; i < chosen.elements(); ++i) {
    const int32_t expert = chosen.as<int32_t>()[i];
    if (expert >= 0) ++counts[expert];
  }
  for (int64_t row = 0; row < scores.dim(0); ++row) {
    const float* s = scores.as<float>() + row * experts;
    const double sum = std::accumulate(s, s + experts, 1e-20);
    for (int64_t e = 0; e < experts; ++e) {
      probabilities[e] +=
          std::nearbyint(double(s[e]) / sum * kProbabilityUnits) / kProbabilityUnits;
    }
  }
}

void add_loads(const Tensor& from, const Tensor& to) {
  const auto count = int64_t(to.bytes() / sizeof(double));
  for (int64_t i = 0; i < count; ++i) to.as<double>()[i] += from.as<double>()[i];
}

void balance_gradient(const AuxLoss& loss, const Tensor& load, const Tensor& balance) {
  const auto* const counts = load.as<double>();
  const double all = std::max(1.0, total_rows(counts, loss.experts));
  for (int64_t e = 0; e < loss.experts; ++e) {
    balance.as<float>()[e] = expert_balance(loss, counts[e], all);
  }
}

void add_aux_losses(const AuxLoss& loss, const Tensor& loads, const Tensor& total) {
  double of_layers = 0;
  for (int64_t layer = 0; layer < loads.dim(0); ++layer) {
    const double* const counts = loads.as<double>() + layer * 2 * loss.experts;
    const double all = std::max(1.0, total_rows(counts, loss.experts));
    double sum = 0;
    for (int64_t e = 0; e < loss.experts; ++e) {
      sum += double(expert_balance(loss, counts[e], all)) * counts[loss.experts + e];
    }
    of_layers += sum;
  }
  *total.as<double>() += of_layers;
}

void adjust_router_bias(const Tensor& load, float rate, const Tensor& bias) {
  const int64_t experts = bias.elements();
  const auto* const counts = load.as<double>();
  const double mean = total_rows(counts, experts) / double(experts);
  for (int64_t e = 0; e < experts; ++e) {
    bias.as<float>()[e] += counts[e] < mean ? rate : counts[e] > mean ? -rate : 0.0f;
  }
}

}  // namespace tandem::cpu
