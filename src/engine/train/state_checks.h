// Checks of a run's data in memory during training, by the table `check` of the configuration.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/parallel/dims.h"
#include "engine/train/finding.h"
#include "engine/train/model_ranks.h"
#include "engine/train/replica_check.h"

namespace tandem {

/// Numbers that the ranks sum in a step.
struct CheckSums {
  uint64_t weights = 0;  ///< ReplicaCheck's, 0 if all copies agree
  CheckSums& operator+=(const CheckSums& other) {
    weights += other.weights;
    return *this;
  }
};

class StateChecks {
 public:
  /// `config.check`, whose action may be "off". Findings are appended to OUT/checks.jsonl, on rank
  /// 0. Arguments must outlive this object. CPU ranks, or "off".
  StateChecks(const ParallelGroups& groups, const TrainConfig& config, const ModelRanks& ranks,
              const std::string& out);

  /// This rank's, between the passes of a step and its update.
  CheckSums sums(int64_t step) const;
  /// Findings, the same on all ranks, if the sums over the world say that there are some.
  /// Collective.
  std::vector<CheckFinding> find(const CheckSums& sums, int64_t step);
  /// Whether a finding ends the run.
  bool stops() const { return config_.check.action == "stop"; }

 private:
  const ParallelGroups& groups_;
  const TrainConfig& config_;
  std::string out_;
  std::optional<ReplicaCheck> replicas_;
};

}  // namespace tandem
