#include "engine/train/checks/finding.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "core/system/json.h"
#include "core/system/lines.h"

namespace tandem {

std::string name_ranks(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

std::string describe(const CheckFinding& finding) {
  const std::string where = fmt::format("step {}: {}", finding.step, finding.tensor);
  if (finding.reason == "copies") {
    return fmt::format("{} differs between {}: one of them is corrupt", where,
                       name_ranks(finding.ranks));
  }
  if (finding.check == "state") {
    return fmt::format(
        "step {}: the optimizer state of {} on {} is corrupt: it has changed since "
        "its last update",
        finding.step, finding.tensor, name_ranks(finding.ranks));
  }
  if (finding.check == "recompute") {
    return fmt::format(
        "step {}: the gradient of {} summed on {} is corrupt: computed again it has "
        "other bits",
        finding.step, finding.tensor, name_ranks(finding.ranks));
  }
  std::vector<int> others;
  std::ranges::set_difference(finding.compared, finding.ranks, std::back_inserter(others));
  return fmt::format("{} of {} is corrupt: it differs from that of {}{}", where,
                     name_ranks(finding.ranks), name_ranks(others),
                     finding.reason == "owner" ? ", as its owner's f32 weights show" : "");
}

std::vector<int> suspected_ranks(const std::vector<CheckFinding>& findings) {
  std::set<int> ranks;
  for (const CheckFinding& finding : findings) {
    ranks.insert(finding.ranks.begin(), finding.ranks.end());
  }
  return {ranks.begin(), ranks.end()};
}

std::string to_json_line(const CheckFinding& finding) {
  const nlohmann::ordered_json json{{"step", finding.step},         {"check", finding.check},
                                    {"tensor", finding.tensor},     {"ranks", finding.ranks},
                                    {"compared", finding.compared}, {"reason", finding.reason}};
  return dump_json(json) + "\n";
}

std::vector<CheckFinding> parse_findings(const std::string& json_lines) {
  std::vector<CheckFinding> findings;
  for (const std::string_view line : Lines(json_lines)) {
    const auto json = parse_json(line);
    if (!json.is_object()) continue;
    findings.push_back(
        {json.at("step").get<int64_t>(), json.at("check").get<std::string>(),
         json.at("tensor").get<std::string>(), json.at("ranks").get<std::vector<int>>(),
         json.at("compared").get<std::vector<int>>(), json.at("reason").get<std::string>()});
  }
  return findings;
}

}  // namespace tandem
