// Checks of a run's data in memory during training, by the table `check` of the configuration.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/parallel/dims.h"
#include "engine/train/checks/finding.h"
#include "engine/train/checks/replica_check.h"
#include "engine/train/config.h"
#include "engine/train/model_ranks.h"
#include "engine/train/step_executor.h"

namespace tandem {

class StateChecks {
 public:
  /// The action of `check` may be "off". Findings are appended to OUT/checks.jsonl, on rank
  /// 0. Arguments must outlive this object. CPU ranks, or "off".
  StateChecks(const ParallelGroups& groups, const IntegrityConfig& check, const ModelRanks& ranks,
              const std::string& out);

  /// In the share `check.recompute` of steps: computes the gradients again, compares the bits of
  /// them and of the loss, and sets `result`. Called before `sums`. Collective.
  void compute_again(int64_t step, const std::function<StepExecutor::Result()>& compute,
                     StepExecutor::Result& result);
  /// This rank's, between the passes of a step and its update.
  CheckSums sums(int64_t step);
  /// Findings, the same on all ranks, if the sums over the world say that there are some.
  /// Collective.
  std::vector<CheckFinding> find(const CheckSums& sums, int64_t step);
  /// Whether a finding ends the run in these processes.
  bool stops() const { return check_.action == "stop" || replaces(); }
  /// Whether the ranks that it names are to be replaced.
  bool replaces() const { return check_.action == "replace"; }

 private:
  /// An element of a chunk's flat array, or none of the loss.
  struct Spot {
    size_t chunk;
    int64_t element;
  };
  std::vector<uint64_t> hash_gradients() const;
  std::vector<Spot> gradient_blocks() const;
  std::string describe_spots(const std::vector<Spot>& spots, const char* check, int64_t step) const;

  const ParallelGroups& groups_;
  const IntegrityConfig& check_;
  const ModelRanks& ranks_;
  std::string out_;
  std::optional<ReplicaCheck> replicas_;
  std::vector<Spot> changed_state_, changed_gradients_;  // of this step
};

}  // namespace tandem
