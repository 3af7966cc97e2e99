#include "engine/model/expert_load.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "schedule/moe.h"

namespace tandem {

void ExpertLoad::clear() {
  std::ranges::fill(sums_, 0.0);
}

void ExpertLoad::add(int layer, const Tensor& scores, const Tensor& chosen) {
  double* counts = sums_.data() + layer * 2 * experts_;
  double* probabilities = counts + experts_;
  if (seen_) seen_(layer, scores, chosen);
  for (int64_t i = 0; i < chosen.elements(); ++i) ++counts[chosen.as<int32_t>()[i]];
  for (int64_t row = 0; row < scores.dim(0); ++row) {
    const float* s = scores.as<float>() + row * experts_;
    const double sum = std::accumulate(s, s + experts_, 1e-20);
    for (int64_t e = 0; e < experts_; ++e) probabilities[e] += double(s[e]) / sum;
  }
}

void ExpertLoad::add(const ExpertLoad& other) {
  for (size_t i = 0; i < sums_.size(); ++i) sums_[i] += other.sums_[i];
}

void ExpertLoad::share(const std::vector<Communicator*>& axes) {
  for (Communicator* axis : axes) {
    if (axis->size() == 1) continue;
    const auto all = axis->exchange(std::as_bytes(std::span(sums_)), "expert load");
    std::vector<double> sums(sums_.size()), other(sums_.size());
    for (const auto& blob : all) {
      std::memcpy(other.data(), blob.data(), blob.size());
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += other[i];
    }
    sums_ = std::move(sums);
  }
}

std::span<const double> ExpertLoad::counts(int layer) const {
  return std::span(sums_).subspan(size_t(layer * 2 * experts_), size_t(experts_));
}
std::span<const double> ExpertLoad::probabilities(int layer) const {
  return std::span(sums_).subspan(size_t((layer * 2 + 1) * experts_), size_t(experts_));
}

double ExpertLoad::imbalance(int layer, int parts) const {
  const auto c = counts(layer);
  std::vector<int64_t> loads(static_cast<size_t>(parts));
  for (size_t e = 0; e < c.size(); ++e) loads[e * loads.size() / c.size()] += int64_t(c[e]);
  return schedule::moe_imbalance(loads.data(), parts);
}

std::vector<float> ExpertLoad::balance(int layer, double coefficient, int64_t top_k) const {
  const auto c = counts(layer);
  const double all = std::max(1.0, std::accumulate(c.begin(), c.end(), 0.0));
  std::vector<float> result;
  for (const double count : c) {
    result.push_back(float(coefficient * double(experts_) * count / all * double(top_k) / all));
  }
  return result;
}

double ExpertLoad::aux_loss(int layer, double coefficient, int64_t top_k) const {
  const auto b = balance(layer, coefficient, top_k);
  const auto p = probabilities(layer);
  double sum = 0;
  for (size_t e = 0; e < b.size(); ++e) sum += double(b[e]) * p[e];
  return sum;
}

double ExpertLoad::aux_loss(double coefficient, int64_t top_k) const {
  double sum = 0;
  for (int layer = 0; layer < int(layers()); ++layer) sum += aux_loss(layer, coefficient, top_k);
  return sum;
}

}  // namespace tandem
