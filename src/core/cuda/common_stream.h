// Streams shared by a rank's operators if ranks share a GPU. All ranks' streams then map to the
// same hardware queues, 32 at most, whatever their green context. Work of two streams in one queue
// is serialized; if two such ranks wait for each other, they wait until the deadline. So a rank
// uses few streams. If a rank has a GPU of its own, each of these is a separate stream.
#pragma once

#include "core/cuda/handles.h"

namespace tandem::gpu {

enum class Common {
  side,        ///< concurrent with the communicator's stream, in the order of its calls; of high
               ///< priority if the rank has a GPU of its own
  other_side,  ///< same, used alternately with `side`
  capture,     ///< for capturing calls, never waited for. If ranks share a GPU: `side`
  prompt,      ///< for work that the host waits for immediately and no rank delays; one for all
               ///< ranks, which also allocates their memory
};

/// `prompt` stream of the GPU of `share`, which must share it, until released there.
cudaStream_t prompt_stream(GpuShare& share);

class CommonStream {
 public:
  /// Uses this thread's share.
  explicit CommonStream(Common which);
  /// Waits for the work enqueued on it, unless it is captured.
  ~CommonStream();
  CommonStream(const CommonStream&) = delete;
  CommonStream& operator=(const CommonStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  std::shared_ptr<GpuShare> share_;
  Common which_;
  cudaStream_t stream_;
};

}  // namespace tandem::gpu
