// Bytes that ranks send along the axes of parallelism, from a run's metrics.jsonl.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace tandem::report {

class SentBytes {
 public:
  /// Takes the counts of a step in the stead of those before; to learners, those of the last step
  /// with an exchange.
  void set(const nlohmann::ordered_json& row);
  /// {"tp", "ep", "dp", "pp", "cp", "sync"}: bytes of a rank in a step, mean of `ranks`; null if
  /// not counted.
  nlohmann::ordered_json json(size_t ranks) const;

 private:
  std::map<std::string, double> bytes_;  // by axis
  bool is_mean_ = false;                 // of the ranks, else their sum
};

}  // namespace tandem::report
