// Data in memory that a check has found corrupt.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

struct CheckFinding {
  int64_t step = 0;           ///< in which it was found
  std::string check;          ///< the key of its share: "weights"
  std::string tensor;         ///< name
  std::vector<int> ranks;     ///< of the world, that are suspected
  std::vector<int> compared;  ///< all ranks that hold a copy
  /// Why these are suspected: "majority", "owner", or "copies" if all of them are, as two copies
  /// differ and neither is known to be right.
  std::string reason;

  bool operator==(const CheckFinding&) const = default;
};

/// "step 12: model.norm.weight of rank 2 differs from the copies of ranks 0, 1".
std::string describe(const CheckFinding& finding);
/// One line of JSON.
std::string to_json_line(const CheckFinding& finding);
std::vector<CheckFinding> parse_findings(const std::string& json_lines);

}  // namespace tandem
