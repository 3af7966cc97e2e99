#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "core/cpu/parallel.h"
#include "kernels/cpu/kernels.h"
#include "observe/recorder.h"

namespace tandem::cpu {
namespace {

constexpr double kTiny = 1e-20;  // min sum of scores that is divided by

/// Writes the scores; false if a logit is not finite.
bool compute_scores(const float* logits, int64_t n, bool sigmoid, float* scores) {
  bool finite = true;
  for (int64_t e = 0; e < n; ++e) finite = finite && std::isfinite(logits[e]);
  if (!finite) {
    std::fill_n(scores, n, 0.0f);
    return false;
  }
  if (sigmoid) {
    for (int64_t e = 0; e < n; ++e) scores[e] = float(1 / (1 + std::exp(-double(logits[e]))));
    return true;
  }
  const double maximum = *std::max_element(logits, logits + n);
  double sum = 0;
  for (int64_t e = 0; e < n; ++e) sum += std::exp(double(logits[e]) - maximum);
  for (int64_t e = 0; e < n; ++e) scores[e] = float(std::exp(double(logits[e]) - maximum) / sum);
  return true;
}

void choose_experts(const float* scores, std::span<const float> bias, int64_t n, int k,
                    int32_t* experts) {
  const auto key = [&](int32_t e) { return scores[e] + (bias.empty() ? 0.0f : bias[size_t(e)]); };
  int filled = 0;
  for (int32_t e = 0; e < n; ++e) {
    int at = filled;
    while (at > 0 && key(e) > key(experts[at - 1])) --at;
    if (at >= k) continue;
    filled = std::min(k, filled + 1);
    for (int i = filled - 1; i > at; --i) experts[i] = experts[i - 1];
    experts[at] = e;
  }
}

double chosen_sum(const float* scores, const int32_t* experts, int k) {
  double sum = kTiny;
  for (int i = 0; i < k; ++i) sum += double(scores[experts[i]]);
  return sum;
}

/// Gradient of the scores from the weights and the balance term, then of the logits from the
/// scores.
void backward_row(const float* scores, const int32_t* experts, const float* dweights, int64_t n,
                  std::span<const float> balance, const RouterOptions& o, double* d,
                  float* dlogits) {
  if (experts[0] < 0) {  // padding
    std::fill_n(dlogits, n, 0.0f);
    return;
  }
  std::fill_n(d, n, 0.0);
  const double sum = o.normalize ? chosen_sum(scores, experts, o.top_k) : 1.0;
  double along = 0;  // along the chosen scores: scaling them all leaves the weights unchanged
  if (o.normalize) {
    for (int i = 0; i < o.top_k; ++i) along += double(dweights[i]) * double(scores[experts[i]]);
    along /= sum;
  }
  for (int i = 0; i < o.top_k; ++i) {
    d[experts[i]] = (double(dweights[i]) - along) * double(o.scale) / sum;
  }
  if (!balance.empty()) {
    double all = kTiny, mean = 0;
    for (int64_t e = 0; e < n; ++e) all += double(scores[e]);
    for (int64_t e = 0; e < n; ++e) mean += double(balance[size_t(e)]) * double(scores[e]) / all;
    for (int64_t e = 0; e < n; ++e) d[e] += (double(balance[size_t(e)]) - mean) / all;
  }
  double dot = 0;
  for (int64_t e = 0; e < n; ++e) dot += d[e] * double(scores[e]);
  for (int64_t e = 0; e < n; ++e) {
    const double s = double(scores[e]);
    dlogits[e] = float(o.sigmoid ? s * (1 - s) * d[e] : s * (d[e] - dot));
  }
}

/// f32 values; none without data.
std::span<const float> to_span(const Tensor& vector) {
  if (!vector.data()) return {};
  return {vector.as<const float>(), size_t(vector.elements())};
}

}  // namespace

void route_forward(const Tensor& logits, const Tensor& bias_values, const RouterOptions& o,
                   const Tensor& scores, const Tensor& experts, const Tensor& weights,
                   const Tensor& tokens) {
  const ScopedSpan span(SpanKind::compute, "route");
  const int64_t n = logits.dim(1);
  const std::span<const float> bias = to_span(bias_values);
  parallel_ranges(logits.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* s = scores.as<float>() + row * n;
      int32_t* chosen = experts.as<int32_t>() + row * o.top_k;
      float* w = weights.as<float>() + row * o.top_k;
      if (tokens.data() && tokens.as<int32_t>()[row] < 0) {
        std::fill_n(s, n, 0.0f);
        std::fill_n(chosen, o.top_k, -1);
        std::fill_n(w, o.top_k, 0.0f);
        continue;
      }
      const bool finite = compute_scores(logits.as<float>() + row * n, n, o.sigmoid, s);
      choose_experts(s, bias, n, o.top_k, chosen);
      const double sum = o.normalize ? chosen_sum(s, chosen, o.top_k) : 1.0;
      for (int i = 0; i < o.top_k; ++i) {
        w[i] = finite ? float(double(s[chosen[i]]) * double(o.scale) / sum)
                      : std::numeric_limits<float>::quiet_NaN();
      }
    }
  });
}

void route_backward(const Tensor& scores, const Tensor& experts, const Tensor& dweights,
                    const Tensor& balance_values, const RouterOptions& o, const Tensor& dlogits) {
  const ScopedSpan span(SpanKind::compute, "route_backward");
  const int64_t n = scores.dim(1);
  const std::span<const float> balance = to_span(balance_values);
  parallel_ranges(scores.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
    std::vector<double> d(static_cast<size_t>(n));
    for (int64_t row = begin; row < end; ++row) {
      backward_row(scores.as<float>() + row * n, experts.as<int32_t>() + row * o.top_k,
                   dweights.as<float>() + row * o.top_k, n, balance, o, d.data(),
                   dlogits.as<float>() + row * n);
    }
  });
}

}  // namespace tandem::cpu
