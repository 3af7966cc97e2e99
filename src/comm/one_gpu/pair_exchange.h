// Messages between pairs of ranks by kernels that store into the peers' memory: NCCL's send and
// receive for ranks that have no NCCL since they share a GPU.
//
// A message is cut into chunks that travel through FIFOs, one for each (channel, source) in the
// destination's memory: the source stores a chunk and counts it as arrived, the destination counts
// it as free after reading it. Counts continue from call to call, in device memory, so a captured
// call can be replayed. Messages of a pair are matched in the order of their calls.
#pragma once

#include <array>
#include <memory>

#include "comm/device/gpu_communicator.h"

namespace tandem::gpu {

/// Max ranks that share a GPU: two teams.
constexpr int kMaxSharing = 2 * kMaxGpus;

/// Memory that this rank sends to a peer and receives into.
struct PairMessage {
  const void* send = nullptr;
  int64_t send_bytes = 0;
  void* recv = nullptr;
  int64_t recv_bytes = 0;
};
using PairMessages =
    std::array<PairMessage, kMaxSharing>;  ///< indexed by peer; the entry of this rank is ignored

class PairExchange {
 public:
  /// Collective.
  explicit PairExchange(GpuCommunicator& comm);
  /// Enqueues on `stream`, the communicator's or a substitute in the same order; all sends and
  /// receives of one call progress concurrently. Any number of bytes at any address. `op` is named
  /// by a Timeout.
  void run(const PairMessages& messages, OpId op, cudaStream_t stream);
  void run(const PairMessages& messages, OpId op) { run(messages, op, comm_.stream()); }

 private:
  template <class Ranks>
  void launch(const PairMessages& messages, OpId op, cudaStream_t stream);

  GpuCommunicator& comm_;
  int channels_;  // max per message
  std::shared_ptr<GpuBuffer> fifos_;
  DeviceMemory counts_;
};

}  // namespace tandem::gpu
