#include "observe/phases.h"

namespace tandem {

std::string_view name_of(Phase phase) {
  constexpr std::array<std::string_view, kPhases> kNames{
      "data",    "forward", "backward", "weight gradients", "update",    "TP wait",
      "EP wait", "PP wait", "DP wait",  "step wait",        "checkpoint"};
  return kNames[size_t(phase)];
}

Phase phase_of_wait(std::string_view name) {
  if (name.starts_with("moe_")) return Phase::ep_wait;
  if (name.starts_with("pp_")) return Phase::pp_wait;
  if (name.starts_with("dp_") || name == "trust_ratios") return Phase::dp_wait;
  if (name == "gradient_norm" || name == "step_times") return Phase::step_wait;
  return Phase::tp_wait;
}

}  // namespace tandem
