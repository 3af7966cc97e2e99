// GEMM+RS by a kernel whose tiles leave in a wire format (encoded.h), between ranks: its memory,
// signals and calls.
#pragma once

#include <memory>

#include "core/cuda/handles.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/gemm_rs/cuda/encoded.h"

namespace tandem::gpu {

class EncodedRsOp {
 public:
  /// Collective: nullptr, on every rank, where the GPU, the shape or the wire has no such kernel.
  static std::unique_ptr<EncodedRsOp> make(GpuCommunicator& comm, const OpDesc& shape);

  bool has_between() const { return kernel_->has_between(); }
  /// Operands as they were checked. `between`: local tiles come between remote ones.
  void run(bool between, const Tensor& x, const Tensor& weight, const Tensor& out);
  /// That a rank sends at a call.
  int64_t wire_bytes() const;

 private:
  EncodedRsOp(GpuCommunicator& comm, const AddingShape& shape,
              std::unique_ptr<EncodedRsKernel> kernel);

  GpuCommunicator& comm_;
  AddingShape shape_;
  std::unique_ptr<EncodedRsKernel> kernel_;
  std::shared_ptr<GpuBuffer> staging_;  // slices, by step of the ring
  DeviceMemory calls_;                  // a CallCounter
};

}  // namespace tandem::gpu
