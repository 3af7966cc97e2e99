#include "kernels/rope.h"

#include <cmath>

namespace tandem {

RopeTable::RopeTable(int64_t max_seq, int64_t head_dim, double theta)
    : half_(head_dim / 2), cos_(size_t(max_seq * half_)), sin_(size_t(max_seq * half_)) {
  for (int64_t i = 0; i < half_; ++i) {
    const double frequency = std::pow(theta, -2.0 * double(i) / double(head_dim));
    for (int64_t position = 0; position < max_seq; ++position) {
      cos_[size_t(position * half_ + i)] = float(std::cos(double(position) * frequency));
      sin_[size_t(position * half_ + i)] = float(std::sin(double(position) * frequency));
    }
  }
}

}  // namespace tandem
