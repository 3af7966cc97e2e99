#include "fit/problem/coordinate_descent.h"

#include <algorithm>
#include <cmath>

#include "fit/problem/vectors.h"

namespace tandem::fit {
namespace {

/// Entries of each column, by row.
struct Columns {
  std::vector<int64_t> offsets;
  std::vector<int32_t> rows;
  Vector values;

  explicit Columns(const Objective& f) : offsets(size_t(f.features()) + 1, 0) {
    for (int64_t r = 0; r < f.rows(); ++r) {
      for (const int32_t column : f.columns_of(r)) ++offsets[size_t(column) + 1];
    }
    for (size_t c = 1; c < offsets.size(); ++c) offsets[c] += offsets[c - 1];
    rows.resize(size_t(offsets.back()));
    values.resize(rows.size());
    std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
    for (int64_t r = 0; r < f.rows(); ++r) {
      const auto columns = f.columns_of(r);
      for (size_t k = 0; k < columns.size(); ++k) {
        const size_t at = size_t(next[size_t(columns[k])]++);
        rows[at] = int32_t(r);
        values[at] = f.values_of(r)[k];
      }
    }
  }
};

class Descent {
 public:
  Descent(const Objective& f, std::span<const double> curvature, double ridge,
          std::span<const double> gradient, double l1, std::span<const double> x)
      : columns_(f),
        curvature_(curvature),
        ridge_(ridge),
        gradient_(gradient),
        l1_(l1),
        x_(x),
        step_(x.size(), 0.0),
        diagonal_(x.size(), ridge),
        margins_(size_t(f.rows()), 0.0) {
    for (size_t c = 0; c < x.size(); ++c) {
      for (size_t k = begin(c); k < end(c); ++k) {
        diagonal_[c] +=
            curvature[size_t(columns_.rows[k])] * columns_.values[k] * columns_.values[k];
      }
    }
  }

  /// Passes over the coordinates that are not 0 until these have settled, then over all.
  Vector run() {
    constexpr int kMaxPasses = 1000;
    std::vector<size_t> all(x_.size());
    for (size_t c = 0; c < all.size(); ++c) all[c] = c;
    double largest = pass(all);
    const double first = largest;
    constexpr double kSettled = 1e-9;
    for (int passes = 0; passes < kMaxPasses && largest > kSettled * first;) {
      std::vector<size_t> active;
      for (const size_t c : all) {
        if (x_[c] + step_[c] != 0) active.push_back(c);
      }
      do {
        largest = pass(active);
        ++passes;
      } while (largest > kSettled * first && passes < kMaxPasses);
      largest = pass(all);
      ++passes;
    }
    return std::move(step_);
  }

 private:
  size_t begin(size_t column) const { return size_t(columns_.offsets[column]); }
  size_t end(size_t column) const { return size_t(columns_.offsets[column + 1]); }

  /// Minimizes over each coordinate in turn; returns the largest change, scaled by its curvature.
  double pass(std::span<const size_t> coordinates) {
    double largest = 0;
    for (const size_t c : coordinates) {
      if (diagonal_[c] == 0) continue;  // no row has this feature, and nothing moves it
      double slope = gradient_[c] + ridge_ * step_[c];
      for (size_t k = begin(c); k < end(c); ++k) {
        const size_t row = size_t(columns_.rows[k]);
        slope += curvature_[row] * columns_.values[k] * margins_[row];
      }
      const double now = x_[c] + step_[c];
      const double next = soft_threshold(now - slope / diagonal_[c], l1_ / diagonal_[c]);
      if (next == now) continue;
      const double change = next - now;
      step_[c] = next - x_[c];
      for (size_t k = begin(c); k < end(c); ++k)
        margins_[size_t(columns_.rows[k])] += change * columns_.values[k];
      largest = std::max(largest, std::abs(change) * std::sqrt(diagonal_[c]));
    }
    return largest;
  }

  const Columns columns_;
  std::span<const double> curvature_;
  const double ridge_;
  std::span<const double> gradient_;
  const double l1_;
  std::span<const double> x_;
  Vector step_;
  Vector diagonal_;
  Vector margins_;  // of the rows, along the step
};

}  // namespace

Vector coordinate_descent(const Objective& f, std::span<const double> curvature, double ridge,
                          std::span<const double> gradient, double l1, std::span<const double> x) {
  return Descent(f, curvature, ridge, gradient, l1, x).run();
}

}  // namespace tandem::fit
