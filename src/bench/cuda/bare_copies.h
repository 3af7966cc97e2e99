// Transfer of all bytes of a call by the copy engine, to be timed.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "comm/device/gpu_communicator.h"
#include "comm/device/link_pacer.h"
#include "core/cuda/check.h"
#include "core/cuda/handles.h"

namespace tandem::gpu {

class BareCopies {
 public:
  BareCopies(GpuCommunicator& comm, int64_t peer_bytes)
      : comm_(comm),
        bytes_(peer_bytes),
        landing_(std::static_pointer_cast<GpuBuffer>(
            comm.allocate(size_t(peer_bytes) * size_t(comm.size()), 0))),
        source_(static_cast<size_t>(peer_bytes)),
        paced_(comm.link_pacer()) {}
  void run() {
    const cudaStream_t stream = comm_.stream();
    paced_.begin(bytes_ * (comm_.size() - 1), stream);
    for (int step = 1; step < comm_.size(); ++step) {
      const int to = (comm_.rank() + step) % comm_.size();
      check(cudaMemcpyAsync(landing_->peer(to) + comm_.rank() * bytes_, source_.data(),
                            source_.bytes(), cudaMemcpyDefault, stream),
            "wire");
    }
    paced_.end(stream);
  }

 private:
  GpuCommunicator& comm_;
  int64_t bytes_;
  std::shared_ptr<GpuBuffer> landing_;
  DeviceMemory source_;
  PacedCopies paced_;
};

}  // namespace tandem::gpu
