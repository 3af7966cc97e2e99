#include "observe/phases.h"

namespace tandem {

std::string_view name_of(Phase phase) {
  constexpr std::array<std::string_view, kPhases> kNames{
      "data",    "forward", "backward",  "weight gradients", "update",    "TP wait", "EP wait",
      "PP wait", "DP wait", "step wait", "checkpoint",       "sync wait", "CP wait"};
  return kNames[size_t(phase)];
}

}  // namespace tandem
