// Arithmetic on dense vectors, in index order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

namespace tandem::fit {

inline double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

inline double norm(std::span<const double> a) {
  return std::sqrt(dot(a, a));
}

/// to += factor * x
inline void add_scaled(std::span<double> to, double factor, std::span<const double> x) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += factor * x[i];
}

/// |a - b| / |b|, or |a - b| if b is 0.
inline double relative_distance(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  const double size = norm(b);
  return std::sqrt(sum) / (size > 0 ? size : 1);
}

/// NaN, of a run that has diverged, is not lost.
inline double max_or_nan(double a, double b) {
  return std::isnan(b) ? b : std::max(a, b);
}

/// Proximal operator of threshold * |x|_1 for one coordinate.
inline double soft_threshold(double x, double threshold) {
  return x > threshold ? x - threshold : x < -threshold ? x + threshold : 0;
}

inline double l1_norm(std::span<const double> a) {
  double sum = 0;
  for (const double value : a) sum += std::abs(value);
  return sum;
}

}  // namespace tandem::fit
