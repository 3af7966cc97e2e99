#include "engine/checkpoint/config.h"

#include "engine/config/section.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr Key<CheckpointConfig> kCheckpointKeys[] = {
    {"every", &CheckpointConfig::every, Range(0, kBig),
     "steps between checkpoints (0: only when the run ends or is stopped)"},
    {"snapshot_every", &CheckpointConfig::snapshot_every, Range(0, kBig),
     "steps between snapshots in memory, from which a run that tandem launch starts again "
     "resumes (0: only for checkpoints)"},
    {"peer_copy", &CheckpointConfig::peer_copy, kAny,
     "each rank's snapshots also in the memory of another rank with the same parameters"},
    {"every_s", &CheckpointConfig::every_s, Range(0, kBig),
     "seconds of training between checkpoints, also (0: none)"},
    {"first_step", &CheckpointConfig::first_step, kAny,
     "a checkpoint after step 1, too, which shows early that saving works"},
    {"keep", &CheckpointConfig::keep, Range(1, kBig), "newest checkpoints kept"},
    {"export_dtype", &CheckpointConfig::export_dtype, one_of("f32", "bf16"),
     "dtype of the weights in final/"},
};

}  // namespace

std::span<const Key<CheckpointConfig>> CheckpointConfig::keys() {
  return kCheckpointKeys;
}

void CheckpointConfig::check() const {
  if (!peer_copy || snapshot_every > 0) return;
  throw ConfigError(
      "checkpoint.peer_copy is true: expected checkpoint.snapshot_every above 0 with it");
}

}  // namespace tandem
