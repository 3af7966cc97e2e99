// Attention in double, as softmax over all keys of a sequence.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/attention/attention.h"
#include "tests/kernels/reference.h"

namespace tandem::test {

constexpr double kTheta = 100;

/// Rotary embedding of one row of heads, in place.
inline void rotate(Doubles& x, const AttentionShape& s, int64_t heads) {
  const int64_t d = s.head_dim, width = heads * d;
  for (int64_t row = 0; row < s.batch * s.seq; ++row) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < d / 2; ++i) {
        const double angle = double(row % s.seq) * std::pow(kTheta, -2.0 * double(i) / double(d));
        double& low = x[size_t(row * width + h * d + i)];
        double& high = x[size_t(row * width + h * d + i + d / 2)];
        const double l = low, u = high;
        low = l * std::cos(angle) - u * std::sin(angle);
        high = u * std::cos(angle) + l * std::sin(angle);
      }
    }
  }
}

/// `window`: 0 or the keys that a query reads. `sinks`: of the heads, or none.
inline Doubles reference(const AttentionShape& s, Doubles q, Doubles k, const Doubles& v,
                         int64_t window = 0, const Doubles& sinks = {}) {
  rotate(q, s, s.heads);
  rotate(k, s, s.kv_heads);
  const int64_t d = s.head_dim, wide = s.heads * d, narrow = s.kv_heads * d;
  Doubles out(q.size());
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      const int64_t kv = h / (s.heads / s.kv_heads);
      for (int64_t i = 0; i < s.seq; ++i) {
        const int64_t qi = (b * s.seq + i) * wide + h * d;
        Doubles p(size_t(i + 1));
        double sum = sinks.empty() ? 0 : std::exp(sinks[size_t(h)]);
        for (int64_t j = 0; j <= i; ++j) {
          if (window > 0 && i - j >= window) continue;
          const int64_t kj = (b * s.seq + j) * narrow + kv * d;
          double score = 0;
          for (int64_t c = 0; c < d; ++c) score += q[size_t(qi + c)] * k[size_t(kj + c)];
          sum += p[size_t(j)] = std::exp(score / std::sqrt(double(d)));
        }
        for (int64_t j = 0; j <= i; ++j) {
          const int64_t kj = (b * s.seq + j) * narrow + kv * d;
          for (int64_t c = 0; c < d; ++c) {
            out[size_t(qi + c)] += p[size_t(j)] / sum * v[size_t(kj + c)];
          }
        }
      }
    }
  }
  return out;
}

}  // namespace tandem::test
