#include "engine/config/keys/checkpoint_keys.h"

#include "engine/config/config_slot.h"

namespace tandem {

std::vector<ConfigKey> checkpoint_keys() {
  constexpr double kMaxInterval = 1e15;
  return {
      {"checkpoint.every",
       TANDEM_SLOT(checkpoint.every),
       0,
       kMaxInterval,
       {},
       "steps between checkpoints (0: only when the run ends or is stopped)"},
      {"checkpoint.snapshot_every",
       TANDEM_SLOT(checkpoint.snapshot_every),
       0,
       kMaxInterval,
       {},
       "steps between snapshots in memory, from which a run that tandem launch starts again "
       "resumes "
       "(0: only for checkpoints)"},
      {"checkpoint.peer_copy",
       TANDEM_SLOT(checkpoint.peer_copy),
       0,
       0,
       {},
       "each rank's snapshots also in the memory of another data-parallel rank"},
      {"checkpoint.every_s",
       TANDEM_SLOT(checkpoint.every_s),
       0,
       kMaxInterval,
       {},
       "seconds of training between checkpoints, also (0: none)"},
      {"checkpoint.first_step",
       TANDEM_SLOT(checkpoint.first_step),
       0,
       0,
       {},
       "a checkpoint after step 1, too, which shows early that saving works"},
      {"checkpoint.keep",
       TANDEM_SLOT(checkpoint.keep),
       1,
       kMaxInterval,
       {},
       "newest checkpoints kept"},
      {"checkpoint.export_dtype",
       TANDEM_SLOT(checkpoint.export_dtype),
       0,
       0,
       {"f32", "bf16"},
       "dtype of the weights in final/"},
  };
}

}  // namespace tandem
