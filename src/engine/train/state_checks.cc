#include "engine/train/state_checks.h"

#include <fcntl.h>

#include "core/file_descriptor.h"

namespace tandem {

StateChecks::StateChecks(const ParallelGroups& groups, const TrainConfig& config,
                         const ModelRanks& ranks, const std::string& out)
    : groups_(groups), config_(config), out_(out) {
  if (config.check.action == "off") return;
  if (config.check.weights > 0) replicas_.emplace(groups, ranks, config.check.weights);
}

CheckSums StateChecks::sums(int64_t step) const {
  CheckSums sums;
  if (replicas_) sums.weights = replicas_->imbalance(step);
  return sums;
}

std::vector<CheckFinding> StateChecks::find(const CheckSums& sums, int64_t step) {
  std::vector<CheckFinding> findings;
  if (sums.weights != 0) findings = replicas_->find(step);
  if (findings.empty() || groups_.world().rank() > 0) return findings;
  std::string lines;
  for (const CheckFinding& finding : findings) lines += to_json_line(finding);
  const std::string path = out_ + "/checks.jsonl";
  const FileDescriptor file(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW);
  append_to(file.get(), path, lines);
  return findings;
}

}  // namespace tandem
