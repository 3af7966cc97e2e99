// All-to-all over a wire format: each pair's rows are separate messages, in chunks through FIFOs
// (comm/device/pair_fifos.cuh), encoded while being stored into the receiver's memory and decoded
// from there. Same values as the CPU (collectives/encoded/encoded_all_to_all.cc). Ranks only need
// to agree on the counts of each pair: slots fit the largest format's chunks.
#pragma once

#include <array>
#include <memory>

#include "comm/device/gpu_communicator.h"
#include "tandem/codec.h"

namespace tandem::gpu {

constexpr int kPairThreads = 256;

/// Elements sent to a peer and received from it.
struct EncodedPair {
  const std::byte* send = nullptr;
  int64_t send_elements = 0;
  std::byte* recv = nullptr;
  int64_t recv_elements = 0;
};
/// Pairs by peer. This rank's rows to itself are copied concurrently with the exchange, unless they
/// are in place.
using EncodedPairs = std::array<EncodedPair, kMaxGpus>;

constexpr int kCopyVectorsAtOnce = 8;  ///< 16-byte vectors that a thread copies at once

class EncodedPairExchange {
 public:
  /// Collective.
  explicit EncodedPairExchange(GpuCommunicator& comm);
  /// Enqueued on the communicator's stream. `wire` has groups, or is lossless. `op`: name in a
  /// Timeout.
  void run(OpId op, const Wire& wire, DType dtype, const EncodedPairs& pairs);

 private:
  int exchanging() const { return 2 * (comm_.size() - 1) * channels_; }
  /// Number of thread blocks that copy `bytes`.
  int copying(int64_t bytes) const;

  GpuCommunicator& comm_;
  int channels_;
  std::shared_ptr<GpuBuffer> fifos_;
  DeviceMemory counts_, lost_;
};

}  // namespace tandem::gpu
