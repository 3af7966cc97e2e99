// AG+GEMM between ranks by a kernel whose shards are sent in a wire format (encoded_copy_warp.cuh):
// its memory, signals and calls. Tiles of the local shard read x uncompressed; remote tiles read
// decoded rows.
#pragma once

#include <memory>

#include "core/cuda/handles.h"
#include "overlap/ag_gemm/cuda/fused.h"
#include "overlap/contract/cuda/encoded.h"

namespace tandem::gpu {

class EncodedAgOp final : public FusedEncoded {
 public:
  /// Collective: null on every rank if the GPUs, the shape or the wire format have no such kernel.
  static std::unique_ptr<FusedEncoded> make(GpuCommunicator& comm, const OpDesc& shape);

  std::vector<Candidate> candidates() override;

 private:
  /// Heads as in FusedAgArgs: the eighths of the local shard's columns of tiles that come first.
  static constexpr int kHeads[] = {8, 4};

  EncodedAgOp(GpuCommunicator& comm, const OpDesc& shape, std::unique_ptr<FusedAgKernel> kernel);
  void run(int head, const Operands& o);
  CallCounter* calls() const { return reinterpret_cast<CallCounter*>(calls_.data()); }
  EncodedShardRoute route(const Tensor& x) const;

  GpuCommunicator& comm_;
  OpDesc shape_;
  int rows_, chunks_;  // per shard
  size_t chunk_bytes_;
  std::unique_ptr<FusedAgKernel> kernel_;
  std::shared_ptr<GpuBuffer> inbox_;  // [source][chunk][row]
  DeviceMemory gathered_;             // [m, k], without the local rows
  DeviceMemory decoded_;              // rows, by source and chunk, summed over all calls
  DeviceMemory calls_;                // a CallCounter
};

}  // namespace tandem::gpu
