// Heat map of rows per expert over the steps of a run: steps are merged until the columns are few
// enough, with each expert's rows over the mean of its layer.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <vector>

namespace tandem::report {

class LoadMap {
 public:
  /// rows[layer][expert], in order of steps. Throws IoError if the shape is empty or differs from
  /// the first step's.
  void add(double step, const std::vector<std::vector<double>>& rows);
  bool empty() const { return columns_.empty(); }
  /// {"steps": first of each column, "load": [layer][column][expert], 1 if all are even}.
  nlohmann::json json() const;

 private:
  struct Column {
    double step = 0;
    int64_t steps = 0;
    std::vector<double> rows;  // [layer][expert]
  };
  size_t max_columns() const;
  void put_together();

  size_t layers_ = 0, experts_ = 0;
  int64_t width_ = 1;  // steps per column
  std::vector<Column> columns_;
};

}  // namespace tandem::report
