#include "fit/problem/objective.h"

#include <algorithm>
#include <cmath>

#include "fit/problem/vectors.h"
#include "tandem/random.h"

namespace tandem::fit {
namespace {

/// 1 / (1 + exp(z)) without overflow.
double sigmoid_of_minus(double z) {
  if (z > 0) {
    const double e = std::exp(-z);
    return e / (1 + e);
  }
  return 1 / (1 + std::exp(z));
}

}  // namespace

std::span<const int32_t> Objective::columns_of(int64_t row) const {
  const size_t begin = size_t(data_.offsets[size_t(rows_.begin + row)]);
  const size_t end = size_t(data_.offsets[size_t(rows_.begin + row) + 1]);
  return std::span(data_.columns).subspan(begin, end - begin);
}

std::span<const double> Objective::values_of(int64_t row) const {
  const size_t begin = size_t(data_.offsets[size_t(rows_.begin + row)]);
  const size_t end = size_t(data_.offsets[size_t(rows_.begin + row) + 1]);
  return std::span(data_.values).subspan(begin, end - begin);
}

double Objective::margin(int64_t row, std::span<const double> x) const {
  const auto columns = columns_of(row);
  const auto values = values_of(row);
  double sum = 0;
  for (size_t k = 0; k < columns.size(); ++k) sum += values[k] * x[size_t(columns[k])];
  return sum;
}

void Objective::add_row(int64_t row, double factor, std::span<double> to) const {
  const auto columns = columns_of(row);
  const auto values = values_of(row);
  for (size_t k = 0; k < columns.size(); ++k) to[size_t(columns[k])] += factor * values[k];
}

double Objective::value(std::span<const double> x) const {
  double sum = 0;
  for (int64_t r = 0; r < rows(); ++r) {
    const double z = margin(r, x);
    switch (loss_) {
      case Loss::logistic: {
        const double yz = label(r) * z;
        sum += std::log1p(std::exp(-std::abs(yz))) + std::max(-yz, 0.0);
        break;
      }
      case Loss::squared:
        sum += 0.5 * (z - label(r)) * (z - label(r));
        break;
    }
  }
  return weight_ * sum + 0.5 * l2_ * dot(x, x);
}

void Objective::gradient(std::span<const double> x, std::span<double> out) const {
  for (size_t i = 0; i < out.size(); ++i) out[i] = l2_ * x[i];
  for (int64_t r = 0; r < rows(); ++r) {
    const double z = margin(r, x), y = label(r);
    const double slope = loss_ == Loss::logistic ? -y * sigmoid_of_minus(y * z) : z - y;
    add_row(r, weight_ * slope, out);
  }
}

Vector Objective::curvature(std::span<const double> x) const {
  Vector curvature(size_t(rows()), weight_);
  if (loss_ == Loss::squared) return curvature;
  for (int64_t r = 0; r < rows(); ++r) {
    const double z = margin(r, x);
    curvature[size_t(r)] *= sigmoid_of_minus(z) * sigmoid_of_minus(-z);
  }
  return curvature;
}

void Objective::hessian_product(std::span<const double> curvature, std::span<const double> v,
                                std::span<double> out, bool data_only) const {
  for (size_t i = 0; i < out.size(); ++i) out[i] = data_only ? 0 : l2_ * v[i];
  for (int64_t r = 0; r < rows(); ++r) add_row(r, curvature[size_t(r)] * margin(r, v), out);
}

double Objective::smoothness() const {
  // The Hessian is largest where each row's curvature is: at x = 0 for both losses.
  const Vector zero(size_t(features()), 0.0), largest = curvature(zero);
  // A random start has a part along the largest eigenvector, whatever the rows have in common.
  Vector v(zero.size()), product(zero.size());
  for (size_t k = 0; k < v.size(); ++k) v[k] = normal(0, stream_of("fit smoothness"), k);
  const double start = norm(v);
  for (double& value : v) value /= start;
  double estimate = 0;
  constexpr int kMaxIterations = 300;
  constexpr double kPrecise = 1e-7;
  for (int i = 0; i < kMaxIterations; ++i) {
    hessian_product(largest, v, product, true);
    const double size = norm(product);
    if (size == 0) return 0;  // no row has a value
    for (size_t k = 0; k < v.size(); ++k) v[k] = product[k] / size;
    if (size <= estimate * (1 + kPrecise)) return size;
    estimate = size;
  }
  return estimate;
}

}  // namespace tandem::fit
