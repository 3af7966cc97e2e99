// A convex problem split over clients, with its exact answer.
#pragma once

#include "fit/options.h"
#include "fit/problem/dataset.h"
#include "fit/problem/objective.h"

namespace tandem::fit {

/// minimize (1 / rows) sum of losses + l2 / 2 |x|^2 + l1 |x|_1
class Problem {
 public:
  /// Takes the data, shuffled if the options say so, and solves the problem exactly, on the calling
  /// thread. Throws InvalidArgument for labels that the loss does not take (`path` names the file),
  /// more clients than rows, and l1 = l2 = 0.
  Problem(Dataset data, const std::string& path, const FitOptions& options);
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  const Dataset& data() const { return data_; }
  size_t features() const { return size_t(data_.features); }
  int clients() const { return clients_; }
  double l1() const { return l1_; }
  double l2() const { return l2_; }
  /// Smoothness of the objective of all rows, and max of the clients', with the term of l2.
  double smoothness() const { return smoothness_; }
  double max_smoothness() const { return max_smoothness_; }
  /// max_smoothness / l2
  double kappa() const { return max_smoothness_ / l2_; }

  /// Objective of a client's rows, consecutive ones in file order (Objective).
  Objective client(int number) const;
  /// Objective of all rows, without the term of l1.
  Objective whole() const;
  /// Value of the whole objective with the term of l1.
  double value(std::span<const double> x) const;

  const Vector& optimum() const { return optimum_; }
  double optimal_value() const { return optimal_value_; }

 private:
  Dataset data_;
  Loss loss_;
  int clients_;
  double l1_, l2_ = 0;
  double smoothness_ = 0, max_smoothness_ = 0;
  Vector optimum_;
  double optimal_value_ = 0;
};

}  // namespace tandem::fit
