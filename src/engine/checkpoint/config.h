// Table `checkpoint`: checkpoints on disk and snapshots in memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace tandem {

template <class S>
struct Key;  // engine/config/section.h

struct CheckpointConfig {
  int64_t every = 0;
  int64_t snapshot_every = 0;
  bool peer_copy = false;
  double every_s = 0;
  bool first_step = false;
  int64_t keep = 2;
  std::string export_dtype = "f32";

  static std::span<const Key<CheckpointConfig>> keys();
  void check() const;  ///< throws ConfigError if keys contradict each other
};

}  // namespace tandem
