// Data in memory that a check has found corrupt.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

struct CheckFinding {
  int64_t step = 0;           ///< in which it was found
  std::string check;          ///< the key of its share: "weights", "state", "recompute"
  std::string tensor;         ///< name
  std::vector<int> ranks;     ///< of the world, that are suspected
  std::vector<int> compared;  ///< all ranks that hold a copy
  /// Reason why these are suspected. Weights: "majority", "owner", or "copies" if all of them are,
  /// as two copies differ and neither is known to be right. Else "hash": of the rank's own data.
  std::string reason;

  bool operator==(const CheckFinding&) const = default;
};

/// Numbers that the ranks sum in a step: all are 0 if nothing is corrupt.
struct CheckSums {
  uint64_t weights = 0;   ///< ReplicaCheck's
  int64_t state = 0;      ///< blocks of the optimizer's state that have changed
  int64_t gradients = 0;  ///< blocks that two computations of them differ in
  CheckSums& operator+=(const CheckSums& other) {
    weights += other.weights, state += other.state, gradients += other.gradients;
    return *this;
  }
};

/// "step 12: model.norm.weight of rank 2 differs from the copies of ranks 0, 1".
std::string describe(const CheckFinding& finding);
/// All ranks that one of them suspects, in order.
std::vector<int> suspected_ranks(const std::vector<CheckFinding>& findings);
/// "rank 2", "ranks 0, 1".
std::string name_ranks(const std::vector<int>& ranks);
/// One line of JSON.
std::string to_json_line(const CheckFinding& finding);
std::vector<CheckFinding> parse_findings(const std::string& json_lines);

}  // namespace tandem
