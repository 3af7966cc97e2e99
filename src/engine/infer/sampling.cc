#include "engine/infer/sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {

void check(const SamplingOptions& options) {
  if (!(options.temperature >= 0) || std::isinf(options.temperature)) {
    throw InvalidArgument(fmt::format("temperature {}: expected 0 or more", options.temperature));
  }
  if (options.top_k < 0) {
    throw InvalidArgument(fmt::format("top-k {}: expected 0 (all) or more", options.top_k));
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    throw InvalidArgument(fmt::format("top-p {}: expected above 0 and at most 1", options.top_p));
  }
}

int32_t sample(std::span<const float> logits, const SamplingOptions& options, uint64_t index) {
  const auto bad = std::ranges::find_if_not(logits, [](float x) { return std::isfinite(x); });
  if (bad != logits.end()) {
    throw InvalidArgument(fmt::format(
        "logit of token {} is {}: expected finite numbers (the model's values leave the range of "
        "its dtype)",
        bad - logits.begin(), *bad));
  }
  const auto likeliest = std::ranges::max_element(logits);
  if (options.temperature == 0) return int32_t(likeliest - logits.begin());
  std::vector<double> weights(logits.size());
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  double total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    weights[i] = std::exp((double(logits[i]) - double(*likeliest)) / options.temperature);
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
  double rest = double(uniform(options.seed, stream_of("sample"), index)) * remaining;
  for (const int32_t token : order) {
    rest -= weights[size_t(token)];
    if (rest < 0) return token;
  }
  return order.back();  // rounding remainder
}

}  // namespace tandem
