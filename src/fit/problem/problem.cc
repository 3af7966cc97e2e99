#include "fit/problem/problem.h"

#include <fmt/format.h>

#include <algorithm>

#include "fit/problem/minimize.h"
#include "fit/problem/vectors.h"
#include "tandem/error.h"

namespace tandem::fit {

Problem::Problem(Dataset data, const std::string& path, const FitOptions& options)
    : data_(std::move(data)), loss_(options.loss), clients_(options.clients), l1_(options.l1) {
  if (loss_ == Loss::logistic) make_classes(data_, find_classes(data_, path), path);
  if (data_.rows() < clients_) {
    throw InvalidArgument(fmt::format("--clients {}: {} has {} rows: expected at least one each",
                                      clients_, path, data_.rows()));
  }
  if (options.shuffle) shuffle_rows(data_, options.seed);
  for (int c = 0; c < clients_; ++c)
    max_smoothness_ = std::max(max_smoothness_, client(c).smoothness());
  l2_ = options.l2.kappa ? max_smoothness_ / (*options.l2.kappa - 1) : options.l2.value;
  if (l1_ == 0 && l2_ == 0) {
    throw InvalidArgument(
        "--l1 and --l2 are 0: expected one of them, for an answer to converge to");
  }
  max_smoothness_ += l2_;
  smoothness_ = whole().smoothness() + l2_;
  const Objective all = whole();
  optimum_.assign(features(), 0.0);
  if (!minimize({.f = all, .l1 = l1_}, optimum_)) {
    throw Error(fmt::format(
        "{}: the exact answer has not converged: expected a larger --l1 or --l2", path));
  }
  optimal_value_ = value(optimum_);
}

Objective Problem::client(int number) const {
  return {data_, shard_of(data_.rows(), clients_, number), double(clients_) / double(data_.rows()),
          loss_, l2_};
}

Objective Problem::whole() const {
  return {data_, {0, data_.rows()}, 1 / double(data_.rows()), loss_, l2_};
}

double Problem::value(std::span<const double> x) const {
  return whole().value(x) + l1_ * l1_norm(x);
}

}  // namespace tandem::fit
