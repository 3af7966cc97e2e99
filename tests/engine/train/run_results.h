// Files that a training run writes into OUT.
#pragma once

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/system/files.h"

namespace tandem {

/// Lines of OUT/metrics.jsonl.
inline std::vector<nlohmann::json> steps_of(const std::string& out) {
  std::istringstream lines(read_file(out + "/metrics.jsonl"));
  std::vector<nlohmann::json> steps;
  for (std::string line; std::getline(lines, line);) steps.push_back(nlohmann::json::parse(line));
  return steps;
}

/// Values of a key, which all lines have.
template <typename T = double>
std::vector<T> values_of(const std::string& out, const char* key) {
  std::vector<T> values;
  for (const nlohmann::json& step : steps_of(out)) values.push_back(step.at(key).get<T>());
  return values;
}

inline std::string final_weights(const std::string& out) {
  return read_file(out + "/final/model.safetensors");
}

}  // namespace tandem
