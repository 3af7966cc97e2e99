// Emulated link for ranks that share a GPU. Each rank has one pacer, which serializes everything
// that it sends to others and adds `latency`. Data may be stored at once; the signal that tells a
// peer of it is raised when the link would have delivered it. So no rank sees bytes sooner than a
// link of that rate could have delivered them.
//
// Kernels receive GpuCommunicator::link_pacer() and call pace() (link_pacer.cuh) just before they
// signal, or reserve() as they store and wait before they signal; copy engines use PacedCopies.
// Without an emulated link the pointer is null and nothing waits. An algorithm that does neither is
// not a candidate on such a link.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "comm/device/device_signal.h"
#include "core/cuda/handles.h"
#include "tandem/communicator.h"

namespace tandem::gpu {

/// Pacer state in device memory; times are those of %globaltimer.
struct LinkPacer {
  float ns_per_byte;
  unsigned long long latency_ns;
  unsigned long long busy_until;  ///< advanced by atomics
  const ErrorRecord* record;      ///< a failure recorded here ends all waits
};

/// Throws InvalidArgument if the pacer cannot emulate this link: 1 MB/s to 10 TB/s, latency at most
/// 1 s.
void check_link_pacer(const EmulatedLink& link);

/// Pacer of one rank and of all communicators split from its communicator.
class OwnedLinkPacer {
 public:
  OwnedLinkPacer(const EmulatedLink& link, const ErrorRecord* record);
  LinkPacer* get() const { return reinterpret_cast<LinkPacer*>(memory_.data()); }
  const EmulatedLink& link() const { return link_; }

 private:
  EmulatedLink link_;
  DeviceMemory memory_;
};

/// Pacing of copies to peers on one stream: waits for the link between the copies and their signal.
/// Without a pacer it enqueues nothing.
class PacedCopies {
 public:
  explicit PacedCopies(LinkPacer* pacer);
  /// Called before copies of `bytes` in total: reserves the link when the stream reaches this
  /// point.
  void begin(int64_t bytes, cudaStream_t stream) const;
  /// Called between the copies and their signal.
  void end(cudaStream_t stream) const;

 private:
  LinkPacer* link_pacer_;
  DeviceMemory due_;
};

}  // namespace tandem::gpu
