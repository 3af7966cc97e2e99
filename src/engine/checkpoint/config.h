// Table `checkpoint`: checkpoints on disk and snapshots in memory.
#pragma once

#include <cstdint>
#include <string>

namespace tandem {

struct CheckpointConfig {
  int64_t every = 0;
  int64_t snapshot_every = 0;
  bool peer_copy = false;
  double every_s = 0;
  bool first_step = false;
  int64_t keep = 2;
  std::string export_dtype = "f32";
};

}  // namespace tandem
