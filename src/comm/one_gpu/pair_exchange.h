// Messages between pairs of ranks by kernels that store into the peers' memory: what NCCL's send
// and receive do, for ranks that have no NCCL since they share a GPU.
//
// A message is cut into chunks that travel through FIFOs, one for each (channel, source) in the
// destination's memory: the source stores a chunk and counts it as arrived, the destination counts
// it as free when it has been read. Counts go on from call to call, in device memory, so a captured
// call can be replayed. Messages of a pair are matched in the order of their calls.
#pragma once

#include <array>
#include <memory>

#include "comm/device/gpu_communicator.h"

namespace tandem::gpu {

/// Ranks that may share a GPU: two teams.
constexpr int kMostSharing = 2 * kMaxGpus;

/// What this rank sends to a peer and receives from it.
struct PairMessage {
  const void* send = nullptr;
  int64_t send_bytes = 0;
  void* recv = nullptr;
  int64_t recv_bytes = 0;
};
using PairMessages =
    std::array<PairMessage, kMostSharing>;  ///< by peer; this rank's own is ignored

class PairExchange {
 public:
  /// Collective.
  explicit PairExchange(GpuCommunicator& comm);
  /// Enqueued on `stream`, the communicator's or one that takes its place in its order; all that
  /// one call sends and receives is under way at once. Any bytes at any address. `op` is what a
  /// Timeout names.
  void run(const PairMessages& messages, OpId op, cudaStream_t stream);
  void run(const PairMessages& messages, OpId op) { run(messages, op, comm_.stream()); }

 private:
  template <class Ranks>
  void launch(const PairMessages& messages, OpId op, cudaStream_t stream);

  GpuCommunicator& comm_;
  int channels_;  // at most, of a message
  std::shared_ptr<GpuBuffer> fifos_;
  DeviceMemory counts_;
};

}  // namespace tandem::gpu
