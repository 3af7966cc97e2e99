// All-to-all over a wire format: every pair's rows are messages of their own, in chunks through
// FIFOs (comm/device/pair_fifos.cuh), encoded as they are stored into the receiver's memory and
// decoded out of it. The CPU's values (collectives/encoded_all_to_all.cc). Ranks need to agree on
// nothing but the counts of each pair: slots are as large as the largest format's chunks.
#pragma once

#include <array>
#include <memory>

#include "comm/device/gpu_communicator.h"
#include "tandem/codec.h"

namespace tandem::gpu {

constexpr int kPairThreads = 256;

/// What goes to a peer and comes from it.
struct EncodedPair {
  const std::byte* send = nullptr;
  int64_t send_elements = 0;
  std::byte* recv = nullptr;
  int64_t recv_elements = 0;
};
/// By peer. What this rank sends itself is copied beside the exchange, unless it is in its place.
using EncodedPairs = std::array<EncodedPair, kMaxGpus>;

constexpr int kOwnAtOnce = 8;  ///< 16-byte vectors that a thread copies together

class EncodedPairExchange {
 public:
  /// Collective.
  explicit EncodedPairExchange(GpuCommunicator& comm);
  /// Enqueued on the communicator's stream. `wire` has groups, or is lossless.
  /// `op` is what a Timeout names.
  void run(OpId op, const Wire& wire, DType dtype, const EncodedPairs& pairs);

 private:
  int exchanging() const { return 2 * (comm_.size() - 1) * channels_; }
  /// Thread blocks that copy so many bytes.
  int copying(int64_t bytes) const;

  GpuCommunicator& comm_;
  int channels_;
  std::shared_ptr<GpuBuffer> fifos_;
  DeviceMemory counts_, lost_;
};

}  // namespace tandem::gpu
