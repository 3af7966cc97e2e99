#include "tests/fit/problems.h"

#include <algorithm>
#include <numeric>

#include "tandem/random.h"

namespace tandem::fit::test {
namespace {

double normal_at(const Shape& shape, uint64_t stream, int64_t index) {
  return double(normal(shape.seed, stream, uint64_t(index)));
}

/// Distinct columns of a row, in increasing order.
std::vector<int32_t> choose_columns(const Shape& shape, int64_t row) {
  std::vector<int32_t> columns(size_t(shape.features));
  std::iota(columns.begin(), columns.end(), 0);
  for (int64_t k = 0; k < shape.entries; ++k) {
    const uint64_t word = philox(shape.seed, 7, uint64_t(row * shape.entries + k))[0];
    std::swap(columns[size_t(k)], columns[size_t(k) + word % uint64_t(shape.features - k)]);
  }
  columns.resize(size_t(shape.entries));
  std::sort(columns.begin(), columns.end());
  return columns;
}

}  // namespace

Dataset make_data(const Shape& shape, Loss loss) {
  Dataset data;
  data.features = shape.features;
  for (int64_t row = 0; row < shape.rows; ++row) {
    const double at = double(row) / double(shape.rows) - 0.5;
    double margin = 0.2 * normal_at(shape, 3, row);
    for (const int32_t column : choose_columns(shape, row)) {
      const double value =
          normal_at(shape, 1, row * shape.features + column) + shape.difference * at;
      data.columns.push_back(column);
      data.values.push_back(value);
      margin += value * (normal_at(shape, 2, column) + shape.difference * at);
    }
    data.offsets.push_back(int64_t(data.columns.size()));
    if (loss == Loss::squared) {
      data.labels.push_back(margin);
    } else {
      data.labels.push_back(row < shape.rows / 2 ? -1 : 1);
    }
  }
  return data;
}

Dataset make_contrasts(int64_t rows, int64_t pairs, Loss loss) {
  Dataset data;
  data.features = 2 * pairs;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t column = int32_t(2 * (row % pairs));
    const double value = double(normal(1, 4, uint64_t(row)));
    data.columns.insert(data.columns.end(), {column, column + 1});
    data.values.insert(data.values.end(), {value, -value});
    data.offsets.push_back(int64_t(data.columns.size()));
    data.labels.push_back(loss == Loss::squared ? double(normal(1, 5, uint64_t(row)))
                          : row < rows / 2      ? -1
                                                : 1);
  }
  return data;
}

void check(const std::string& method, const FitOptions& options) {
  const MethodRow* row = &find_method(method);
  check_options({&row, 1}, options);
}

FitRun run(const std::string& method, const Problem& problem, const FitOptions& options,
           int ranks) {
  FitRun result;
  run_threads({.ranks = ranks}, [&](Communicator& comm) {
    FitRun finished = run_method(comm, problem, find_method(method), options);
    if (comm.rank() == 0) result = std::move(finished);
  });
  return result;
}

}  // namespace tandem::fit::test
