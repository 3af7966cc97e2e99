// Medians of unsorted values, at least one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace tandem {

/// The middle value; of an even number the larger of both in the middle.
template <typename T>
double upper_median(std::vector<T> values) {
  const auto middle = values.begin() + ptrdiff_t(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

/// The middle value; of an even number the mean of both in the middle.
inline double interpolated_median(std::vector<double> values) {
  const auto middle = values.begin() + ptrdiff_t(values.size() / 2);
  std::ranges::nth_element(values, middle);
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

}  // namespace tandem
