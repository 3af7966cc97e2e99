// One call of a fused kernel, recorded on the GPUs of all ranks and put on one time axis.
//
// The GPUs' global timers do not agree. Ranks leave a device barrier many times and read their
// timers; the median difference to rank 0's is what a rank's times are shifted by. What is left is
// what ranks leave a barrier apart, a microsecond or two.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "gemm/cuda/tile_log.h"
#include "observe/trace.h"
#include "tune/cuda/measure.h"

namespace tandem::gpu {

/// The memory that a kernel records in.
class TileRecorder {
 public:
  explicit TileRecorder(const RecordedTiles& tiles);
  TileLog log() const;
  /// In stream order: forgets what was recorded.
  void clear(cudaStream_t stream) const;
  /// What has been recorded by work that has ended.
  std::vector<TileRecord> read() const;

 private:
  RecordedTiles tiles_;
  DeviceMemory records_, products_;
};

struct RecordedCall {
  std::function<void()> run;  ///< enqueues it on the communicator's stream
  /// This rank's events from its records; `base_ns` is the timer just before the call, `base` an
  /// event recorded then.
  std::function<std::vector<SpanEvent>(const std::vector<TileRecord>& records, uint64_t base_ns,
                                       const Event& base)>
      events;
};

/// Collective: the events of all ranks in one call, made as the stopwatch makes a timed one.
std::vector<RankEvents> record_tiles(GpuCommunicator& comm, Stopwatch& stopwatch,
                                     const TileRecorder& recorder, const RecordedCall& call);

}  // namespace tandem::gpu
