#include "fit/problem/dataset.h"

#include <fmt/format.h>

#include <numeric>
#include <set>

#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem::fit {

Classes find_classes(const Dataset& data, const std::string& path) {
  std::set<double> found;
  for (const double label : data.labels) {
    found.insert(label);
    if (found.size() > 2) break;
  }
  if (found.size() != 2) {
    throw InvalidArgument(fmt::format(
        "{}: {} of labels ({:g}{}): expected two classes (--loss squared takes any numbers)", path,
        found.size() == 1 ? "one value" : "more than two values", *found.begin(),
        found.size() == 1
            ? ""
            : fmt::format(", {:g}, {:g}", *std::next(found.begin()), *std::prev(found.end()))));
  }
  return {*found.begin(), *std::prev(found.end())};
}

void make_classes(Dataset& data, const Classes& classes, const std::string& path) {
  for (double& label : data.labels) {
    if (label != classes.negative && label != classes.positive) {
      throw InvalidArgument(fmt::format("{}: label {:g}: expected a class, {:g} or {:g}", path,
                                        label, classes.negative, classes.positive));
    }
    label = label == classes.negative ? -1 : 1;
  }
}

double accuracy(const Dataset& data, std::span<const double> x) {
  int64_t right = 0;
  for (size_t row = 0; row < data.labels.size(); ++row) {
    double margin = 0;
    for (int64_t k = data.offsets[row]; k < data.offsets[row + 1]; ++k) {
      const size_t column = size_t(data.columns[size_t(k)]);
      if (column < x.size()) margin += data.values[size_t(k)] * x[column];
    }
    right += margin * data.labels[row] > 0;
  }
  return double(right) / double(data.rows());
}

void shuffle_rows(Dataset& data, uint64_t seed) {
  std::vector<int64_t> order(size_t(data.rows()));
  std::iota(order.begin(), order.end(), int64_t(0));
  for (size_t i = order.size(); i > 1; --i) {
    const auto words = philox(seed, stream_of("fit rows"), i);
    std::swap(order[i - 1], order[(uint64_t(words[0]) << 32 | words[1]) % i]);
  }
  Dataset to;
  to.features = data.features;
  to.columns.reserve(data.columns.size());
  to.values.reserve(data.values.size());
  for (const int64_t row : order) {
    for (int64_t k = data.offsets[size_t(row)]; k < data.offsets[size_t(row) + 1]; ++k) {
      to.columns.push_back(data.columns[size_t(k)]);
      to.values.push_back(data.values[size_t(k)]);
    }
    to.offsets.push_back(int64_t(to.columns.size()));
    to.labels.push_back(data.labels[size_t(row)]);
  }
  data = std::move(to);
}

}  // namespace tandem::fit
