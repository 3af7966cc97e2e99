// An emulated link for ranks that share a GPU: each has one line, over which everything that it
// sends to others leaves, one after another, `latency` before it arrives. Data may be stored at
// once; the signal that tells a peer of it is raised when the line would have delivered it. So
// nobody sees bytes sooner than a link of that rate could have brought them.
//
// Kernels are given GpuCommunicator::line() and call pace() (line.cuh) just before they signal, or
// reserve() as they store and wait before they signal; for what a copy engine moves there is
// PacedCopies. Where there is no emulated link, the line is null and nothing waits. What does
// neither is no candidate on such a link.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "comm/device/device_signal.h"
#include "core/cuda/handles.h"
#include "tandem/communicator.h"

namespace tandem::gpu {

/// In device memory; times are those of %globaltimer.
struct Line {
  float ns_per_byte;
  unsigned long long latency_ns;
  unsigned long long busy_until;  ///< advanced by atomics
  const ErrorRecord* record;      ///< where a failure ends all waits
};

/// Throws InvalidArgument where a line cannot keep such a link's time: 1 MB/s to 10 TB/s, at most
/// 1 s.
void check_line(const EmulatedLink& link);

/// The line of one rank and of all communicators that are split from its own.
class OwnedLine {
 public:
  OwnedLine(const EmulatedLink& link, const ErrorRecord* record);
  Line* get() const { return reinterpret_cast<Line*>(memory_.data()); }
  const EmulatedLink& link() const { return link_; }

 private:
  EmulatedLink link_;
  DeviceMemory memory_;
};

/// Around copies to peers that are enqueued on one stream, between which and their signal the line
/// has to be waited for. Without a line it enqueues nothing.
class PacedCopies {
 public:
  explicit PacedCopies(Line* line);
  /// Before copies of `bytes` in all: the line is taken from when the stream has come this far.
  void begin(int64_t bytes, cudaStream_t stream) const;
  /// Between the copies and their signal.
  void end(cudaStream_t stream) const;

 private:
  Line* line_;
  DeviceMemory due_;
};

}  // namespace tandem::gpu
