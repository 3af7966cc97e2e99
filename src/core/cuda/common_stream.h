// Streams that a rank's operators have in common where ranks share a GPU. The streams of all ranks
// take the same hardware queues there, 32 at most, whatever green context they are of. In a queue
// that two streams have, work of one waits behind work of the other; were they of two ranks that
// wait for each other, it would wait until the deadline. So a rank has few streams. Where it has
// the GPU to itself each of these is a stream of its own.
#pragma once

#include "core/cuda/handles.h"

namespace tandem::gpu {

enum class Common {
  side,        ///< beside the communicator's stream, in the order of its calls; of high priority
               ///< where the rank has the GPU to itself
  other_side,  ///< the same, which takes turns with `side`
  capture,     ///< for capturing calls: nothing of it waits. Of ranks that share a GPU: `side`
  prompt,      ///< for what the host waits for at once and no rank holds up; all ranks have one,
               ///< which allocates their memory, too
};

/// `prompt` of the GPU of `share`, which is not alone, until it is released there.
cudaStream_t prompt_stream(GpuShare& share);

class CommonStream {
 public:
  /// Of the share that this thread has.
  explicit CommonStream(Common which);
  /// Waits for what was enqueued on it, unless it is captured.
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
