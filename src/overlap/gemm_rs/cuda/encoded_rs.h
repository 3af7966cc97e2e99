// GEMM+RS between ranks by the kernel of encoded.h: its memory, signals and calls.
#pragma once

#include <memory>

#include "core/cuda/handles.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/gemm_rs/cuda/encoded.h"

namespace tandem::gpu {

class EncodedRsOp {
 public:
  /// Collective: null on every rank if the GPU, the shape or the wire format has no such kernel.
  static std::unique_ptr<EncodedRsOp> make(GpuCommunicator& comm, const OpDesc& shape);

  bool has_between() const { return kernel_->has_between(); }
  /// Operands must have been checked. `between`: interleave local tiles with remote ones.
  void run(bool between, const Tensor& x, const Tensor& weight, const Tensor& out);
  /// Bytes that a rank sends per call.
  int64_t wire_bytes() const;

 private:
  EncodedRsOp(GpuCommunicator& comm, const FusedRsShape& shape,
              std::unique_ptr<EncodedRsKernel> kernel);

  GpuCommunicator& comm_;
  FusedRsShape shape_;
  std::unique_ptr<EncodedRsKernel> kernel_;
  std::shared_ptr<GpuBuffer> staging_;  // slices, by ring step
  DeviceMemory calls_;                  // a CallCounter
};

}  // namespace tandem::gpu
