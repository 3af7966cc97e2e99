// Phases of a training step on one rank: its own work by pass, and its waits by what they were for.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tandem {

enum class Phase : uint8_t {
  data,              ///< waits for text
  forward,           ///< computation of forward passes, as the next three are of others
  backward,          ///< backward passes, without weight gradients that have passes of their own
  weight_gradients,  ///< those passes
  update,            ///< sums of gradients, the optimizer and all else between the passes
  tp_wait,           ///< waits for the ranks that share a layer
  ep_wait,           ///< waits for ranks with other experts
  pp_wait,           ///< waits for other pipeline stages
  dp_wait,           ///< waits for gradients and weights of other replicas
  step_wait,         ///< waits for the slowest rank's sums
  checkpoint,        ///< waits for snapshots and checkpoints
  sync_wait,         ///< waits for what other learners have changed
  cp_wait            ///< waits for the ranks that have other rows of the same sequences
};
constexpr size_t kPhases = 13;
std::string_view name_of(Phase phase);

/// Work of the rank itself: if it takes longer there than on other ranks, these wait for it.
constexpr bool is_work(Phase phase) {
  return phase <= Phase::update || phase == Phase::checkpoint;
}

/// Milliseconds by phase.
using PhaseTimes = std::array<double, kPhases>;

}  // namespace tandem
