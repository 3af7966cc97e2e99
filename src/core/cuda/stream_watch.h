// Waits of the host for a stream whose kernels may wait for other ranks: a bare wait would not end
// if one of them never comes.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace tandem::gpu {

/// Checks of whoever owns a stream's work. They end a wait by throwing.
class StreamChecks {
 public:
  virtual ~StreamChecks() = default;
  /// Called again and again while the host waits: for `what`, so far for `waited_s`.
  virtual void check_wait(const char* what, double waited_s) const = 0;
  /// Called when the awaited work has ended.
  virtual void check_end() const = 0;
};

/// While it lives, waits for `stream` call `checks`. Several owners may watch one stream.
class StreamWatch {
 public:
  StreamWatch(cudaStream_t stream, const StreamChecks& checks);
  ~StreamWatch();
  StreamWatch(const StreamWatch&) = delete;
  StreamWatch& operator=(const StreamWatch&) = delete;

 private:
  cudaStream_t stream_;
  const StreamChecks& checks_;
};

/// Blocks until `query` no longer answers cudaErrorNotReady, and throws DeviceError for any other
/// answer than success. `check`: called with the seconds waited so far, not at once.
void poll(const char* what, const std::function<cudaError_t()>& query,
          const std::function<void(double)>& check);

/// Blocks until the work enqueued on `stream` has ended; with the checks of its watchers, if any.
void await_stream(cudaStream_t stream, const char* what);
/// Waits for work up to `event`, which was recorded on `stream` or not at all.
void await_event(cudaEvent_t event, cudaStream_t stream, const char* what);

}  // namespace tandem::gpu
