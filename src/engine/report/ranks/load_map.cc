#include "engine/report/ranks/load_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "tandem/error.h"

namespace tandem::report {

namespace {

constexpr size_t kMaxColumns = 96, kFewestColumns = 8;
constexpr size_t kMaxCells = 60000;  // total of all layers, limits the page size

}  // namespace

size_t LoadMap::max_columns() const {
  return std::clamp(kMaxCells / (layers_ * experts_), kFewestColumns, kMaxColumns);
}

void LoadMap::add(double step, const std::vector<std::vector<double>>& rows) {
  if (columns_.empty()) {
    layers_ = rows.size();
    experts_ = rows.empty() ? 0 : rows[0].size();
  }
  const bool fits =
      rows.size() == layers_ && layers_ * experts_ > 0 &&
      std::ranges::all_of(rows, [&](const auto& of) { return of.size() == experts_; });
  if (!fits) {
    throw IoError(fmt::format("report: expert_rows of step {}: expected {} layers of {} experts",
                              step, std::max<size_t>(1, layers_), std::max<size_t>(1, experts_)));
  }
  if (columns_.empty() || columns_.back().steps == width_) {
    if (columns_.size() == max_columns()) put_together();
  }
  if (columns_.empty() || columns_.back().steps == width_) {
    columns_.push_back({step, 0, std::vector<double>(layers_ * experts_)});
  }
  Column& column = columns_.back();
  ++column.steps;
  auto to = column.rows.begin();
  for (const auto& layer : rows) {
    for (const double count : layer) *to++ += count;
  }
}

/// Merges pairs of adjacent columns.
void LoadMap::put_together() {
  std::vector<Column> halved;
  for (size_t i = 0; i < columns_.size(); ++i) {
    if (i % 2 == 0) {
      halved.push_back(std::move(columns_[i]));
      continue;
    }
    Column& to = halved.back();
    to.steps += columns_[i].steps;
    for (size_t j = 0; j < to.rows.size(); ++j) to.rows[j] += columns_[i].rows[j];
  }
  columns_ = std::move(halved);
  width_ *= 2;
}

nlohmann::json LoadMap::json() const {
  using Json = nlohmann::json;
  Json steps = Json::array(), load = Json::array();
  for (const Column& column : columns_) steps.push_back(column.step);
  for (size_t layer = 0; layer < layers_; ++layer) {
    Json of_layer = Json::array();
    for (const Column& column : columns_) {
      const auto begin = column.rows.begin() + std::ptrdiff_t(layer * experts_);
      const double mean =
          std::accumulate(begin, begin + std::ptrdiff_t(experts_), 0.0) / double(experts_);
      Json cells = Json::array();
      for (size_t e = 0; e < experts_; ++e) {
        cells.push_back(mean > 0 ? std::round(begin[std::ptrdiff_t(e)] / mean * 1e3) / 1e3 : 1.0);
      }
      of_layer.push_back(std::move(cells));
    }
    load.push_back(std::move(of_layer));
  }
  return {{"steps", std::move(steps)}, {"load", std::move(load)}};
}

}  // namespace tandem::report
