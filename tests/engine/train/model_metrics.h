// Entries of OUT/metrics.jsonl about the model: those that do not depend on timing or on the
// layout.
#pragma once

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/system/files.h"

namespace tandem {

/// By line.
inline std::vector<std::string> model_metrics(const std::string& out) {
  std::istringstream lines(read_file(out + "/metrics.jsonl"));
  std::vector<std::string> values;
  for (std::string line; std::getline(lines, line);) {
    const auto all = nlohmann::json::parse(line);
    nlohmann::json selected;
    for (const char* key : {"step", "loss", "grad_norm", "lr", "tokens", "batch", "aux_loss",
                            "imbalance", "expert_imbalance", "expert_rows", "validation_loss"}) {
      if (all.contains(key)) selected[key] = all[key];
    }
    values.push_back(selected.dump());
  }
  return values;
}

}  // namespace tandem
