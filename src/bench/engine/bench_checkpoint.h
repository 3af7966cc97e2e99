// Rates of checkpoints, for `tandem bench checkpoint`: the code of a run (engine/checkpoint/) saves
// and loads a model of a given size, next to raw writes and reads of as many bytes by the same
// ranks in the same folder.
#pragma once

#include <cstdint>
#include <string>

#include "bench/bench.h"
#include "engine/config/config.h"

namespace tandem {

struct CheckpointBench {
  double gigabytes = 1;  ///< of a checkpoint, of all ranks
  int ranks = 1;         ///< data-parallel, which divide the state
  std::string folder;    ///< new, on the disk that is measured; removed afterwards
  int repeats = 3;
};

struct CheckpointBenchResult {
  uint64_t bytes = 0;  ///< of a checkpoint
  int64_t parameters = 0;
  /// Time that a step waits for the snapshot, and until the next update may change the state.
  BenchTimes blocked, copied;
  BenchTimes saved;     ///< from the snapshot's begin until it is verified on disk, on all ranks
  BenchTimes loaded;    ///< from page cache
  BenchTimes verified;  ///< from page cache, by rank 0, as a run that resumes does before it loads
  BenchTimes disk_write, disk_read;  ///< raw: writes with fsync, reads from page cache

  /// GB/s of each rank.
  double rate(const BenchTimes& times, int ranks) const {
    return double(bytes) / ranks / times.median_us * 1e-3;
  }
};

/// Throws ConfigError for a model that GPUs refuse, or InvalidArgument if memory is too small.
TrainConfig checkpoint_bench_config(const CheckpointBench& request, bool on_gpus);

/// Returns equal results on all ranks. Throws IoError if the folder exists, and Error if a loaded
/// state differs from the saved one. Collective.
CheckpointBenchResult run_checkpoint_bench(Communicator& world, const CheckpointBench& request);

}  // namespace tandem
