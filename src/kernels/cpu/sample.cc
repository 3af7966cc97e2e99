#include "kernels/sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

namespace tandem {
namespace {

int32_t choose(std::span<const float> logits, size_t likeliest, const SampleOptions& options) {
  if (options.temperature == 0) return int32_t(likeliest);
  std::vector<double> weights(logits.size());
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  double total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    weights[i] = std::exp((double(logits[i]) - double(logits[likeliest])) / options.temperature);
    total += weights[i];
  }
  const bool few = options.top_k > 0 && size_t(options.top_k) < order.size();
  if (few || options.top_p < 1) {
    std::ranges::stable_sort(order, std::greater<>(),
                             [&](int32_t i) { return weights[size_t(i)]; });
  }
  if (few) {
    order.resize(size_t(options.top_k));
    total = 0;
    for (const int32_t token : order) total += weights[size_t(token)];
  }
  double remaining = total;
  if (options.top_p < 1) {
    remaining = 0;
    size_t count = 0;
    while (count < order.size() && remaining < options.top_p * total) {
      remaining += weights[size_t(order[count++])];
    }
    order.resize(count);
  }
  double rest = options.uniform * remaining;
  int32_t last = int32_t(likeliest);
  for (const int32_t token : order) {
    if (weights[size_t(token)] > 0) last = token;
    rest -= weights[size_t(token)];
    if (rest < 0) return token;
  }
  return last;  // rounding remainder
}

}  // namespace

Sampled sample_row(std::span<const float> logits, const SampleOptions& options,
                   std::span<const float> changed) {
  if (!std::ranges::all_of(logits, [](float x) { return std::isfinite(x); })) return {-1, 0};
  const auto argmax = [](std::span<const float> values) {
    return size_t(std::ranges::max_element(values) - values.begin());
  };
  const size_t likeliest = argmax(logits);
  const int32_t token = changed.empty() ? choose(logits, likeliest, options)
                                        : choose(changed, argmax(changed), options);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double(logit) - double(logits[likeliest]));
  return {token, float(double(logits[size_t(token)]) - double(logits[likeliest]) - std::log(sum))};
}

}  // namespace tandem
