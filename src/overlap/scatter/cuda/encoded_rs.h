// GEMM+RS between ranks by the kernel of encoded.h: its memory, signals and calls.
#pragma once

#include <memory>

#include "core/cuda/handles.h"
#include "overlap/contract/cuda/encoded.h"
#include "overlap/scatter/cuda/encoded.h"

namespace tandem::gpu {

class EncodedRsOp final : public FusedEncoded {
 public:
  /// Collective: null on every rank if the GPU, the shape or the wire format has no such kernel.
  static std::unique_ptr<FusedEncoded> make(GpuCommunicator& comm, const OpDesc& shape);

  std::vector<Candidate> candidates() override;

 private:
  EncodedRsOp(GpuCommunicator& comm, const FusedRsShape& shape,
              std::unique_ptr<EncodedRsKernel> kernel);
  /// `between`: interleave local tiles with remote ones.
  void run(bool between, const Operands& o);

  GpuCommunicator& comm_;
  FusedRsShape shape_;
  std::unique_ptr<EncodedRsKernel> kernel_;
  std::shared_ptr<GpuBuffer> staging_;  // slices, by ring step
  DeviceMemory calls_;                  // a CallCounter
};

}  // namespace tandem::gpu
