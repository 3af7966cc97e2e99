// Recording of one call of a fused kernel on the GPUs of all ranks, on one time axis.
//
// The GPUs' global timers are not synchronized. Ranks leave a device barrier many times and read
// their timers; the median difference to rank 0's is subtracted from a rank's times. The remaining
// error is the skew of ranks leaving a barrier, a microsecond or two.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "gemm/cuda/tile_log.h"
#include "observe/trace.h"
#include "tune/cuda/measure.h"

namespace tandem::gpu {

/// Device memory in which a kernel records its tiles.
class TileRecorder {
 public:
  explicit TileRecorder(const RecordedTiles& tiles);
  TileLog log() const;
  /// Clears the records, in stream order.
  void clear(cudaStream_t stream) const;
  /// Records of completed work.
  std::vector<TileRecord> read() const;

 private:
  RecordedTiles tiles_;
  DeviceMemory records_, products_;
};

struct RecordedCall {
  std::function<void()> run;  ///< enqueues the call on the communicator's stream
  /// Converts records to this rank's events; `base_ns` is the timer just before the call, `base` an
  /// event recorded then.
  std::function<std::vector<SpanEvent>(const std::vector<TileRecord>& records, uint64_t base_ns,
                                       const Event& base)>
      events;
};

/// Events of all ranks in one call, launched like the stopwatch's timed calls. Collective.
std::vector<RankEvents> record_tiles(GpuCommunicator& comm, Stopwatch& stopwatch,
                                     const TileRecorder& recorder, const RecordedCall& call);

}  // namespace tandem::gpu
