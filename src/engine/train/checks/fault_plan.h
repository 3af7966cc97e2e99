// Faults to inject into a training run, for tests of what notices them: a TOML file.
//
//   seed = 1                  # of random places, ranks and faults
//   [[fault]]
//   step = 3                  # before which it happens, from 1
//   rank = 1                  # of the world; without it a random one
//   kind = "flip_weights"
//   tensor = "*.q_proj.*"     # flips: pattern of names; without it any
//   file = "*/metrics.jsonl"   # no_space, io_error: pattern of paths; without it any
//   bit = 30                  # flips: of an element's; without it a random one
//   percent = 50              # slow, slow_link: time that computation, or messages, take longer
//   phase = "backward"        # slow: without it forward and backward passes; kill: at the end of
//                             # a span in this phase of the step
//   span = "outer_step"       # kill: at the end of a span with this name, as in traces
//   seconds = 0.1             # pause, and slow ranks of `tandem launch`: how long; clock: how far
//   ppm = 50                  # clock: how much it gains in a million seconds
//   peer = 2                  # slow_link: the destination; without it the next rank
//
//   [random]                  # more of them: in each step and rank with this probability
//   rate = 0.01
//   kinds = ["kill", "slow"]
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "observe/phases.h"

namespace tandem {

enum class FaultKind : uint8_t {
  kill,             ///< SIGKILL of the rank's process, before the step or after a span of it
  hang,             ///< SIGSTOP of it
  pause,            ///< SIGSTOP for `seconds`
  slow,             ///< computation takes longer from then on
  flip_weights,     ///< a bit of the weights that passes read
  flip_masters,     ///< of the owner's f32 weights
  flip_moments,     ///< of a moment of the optimizer, or of a learner's anchors or outer momenta
  flip_gradients,   ///< of the reduced gradients
  flip_message,     ///< of the next large message to another process
  flip_checkpoint,  ///< of the first checkpoint's files from this step on
  no_space,         ///< the next write to a file by its process fails with ENOSPC
  io_error,         ///< it fails with EIO
  clock,            ///< the rank's clock in traces is set `seconds` ahead and gains `ppm`
  slow_link,        ///< messages to `peer` take longer on an emulated link from then on
  late_message,  ///< of the rank's learner, of the fragment sent after the step; all others count
};
std::string_view name_of(FaultKind kind);

struct Fault {
  int64_t step = 1;
  int rank = 0;
  FaultKind kind = FaultKind::kill;
  std::string tensor = {};  ///< pattern; empty: any
  std::string file = "*";   ///< pattern of paths
  int bit = -1;             ///< -1: random
  double percent = 100;
  /// Phase of work, or none for forward and backward passes; of a kill any phase.
  std::optional<Phase> phase = {};
  std::string span = {};  ///< of a kill
  double seconds = -1;    ///< -1: 0.1 of a pause; a slow rank remains slow
  double ppm = 0;
  int peer = -1;        ///< -1: the next rank
  uint64_t number = 0;  ///< of a fault in the run: the index of its random numbers
};

class FaultPlan {
 public:
  /// No faults.
  FaultPlan() = default;
  /// Throws ConfigError that names file, line, key and value, for a rank that a world of `ranks`
  /// does not have, too. `file`: of `text`, in messages.
  FaultPlan(const std::string& text, const std::string& file, int ranks);

  bool empty() const { return faults_.empty() && rate_ == 0; }
  /// Faults of all ranks before a step; the same on every rank.
  std::vector<Fault> at(int64_t step) const;
  /// Whether one of this kind is listed or may be drawn.
  bool has(FaultKind kind) const;
  /// Faults that the plan lists, and kinds of random ones.
  const std::vector<Fault>& listed() const { return faults_; }
  const std::vector<FaultKind>& random_kinds() const { return kinds_; }
  uint64_t seed() const { return seed_; }
  /// Text that it was read from.
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  uint64_t seed_ = 1;
  int ranks_ = 1;
  double rate_ = 0;
  std::vector<FaultKind> kinds_;
  std::vector<Fault> faults_;
};

}  // namespace tandem
