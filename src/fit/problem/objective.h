// Smooth objective of some rows:
//   f(x) = weight * sum over rows of loss(a_r . x, label_r) + l2 / 2 |x|^2
// With weight = clients / rows for the rows of each client, the mean of the clients' objectives is
// the objective of all rows with weight 1 / rows, whatever the sizes of the clients.
#pragma once

#include <cstdint>
#include <span>

#include "fit/problem/dataset.h"
#include "tandem/collectives.h"

namespace tandem::fit {

enum class Loss : uint8_t {
  logistic,  ///< log(1 + exp(-y z)), y = -1 or +1
  squared,   ///< (z - y)^2 / 2
};

class Objective {
 public:
  /// `data` must outlive the objective.
  Objective(const Dataset& data, Shard rows, double weight, Loss loss, double l2)
      : data_(data), rows_(rows), weight_(weight), loss_(loss), l2_(l2) {}

  int64_t features() const { return data_.features; }
  int64_t rows() const { return rows_.count; }
  double l2() const { return l2_; }

  double value(std::span<const double> x) const;
  void gradient(std::span<const double> x, std::span<double> out) const;
  /// weight * loss''(a_r . x) of each row: what the Hessian at x is made of.
  Vector curvature(std::span<const double> x) const;
  /// out = Hessian * v, without the term of l2 if `data_only`.
  void hessian_product(std::span<const double> curvature, std::span<const double> v,
                       std::span<double> out, bool data_only = false) const;
  /// Lipschitz constant of the gradient without the term of l2, by power iteration.
  double smoothness() const;

  std::span<const int32_t> columns_of(int64_t row) const;
  std::span<const double> values_of(int64_t row) const;

 private:
  double margin(int64_t row, std::span<const double> x) const;
  void add_row(int64_t row, double factor, std::span<double> to) const;
  double label(int64_t row) const { return data_.labels[size_t(rows_.begin + row)]; }

  const Dataset& data_;
  Shard rows_;
  double weight_;
  Loss loss_;
  double l2_;
};

}  // namespace tandem::fit
