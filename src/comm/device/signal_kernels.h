// Signals as stream-ordered steps. Epochs are in device memory and advanced by the kernels, so a
// captured graph can be replayed.
#pragma once

#include <cuda_runtime_api.h>

#include "comm/device/device_signal.h"

namespace tandem::gpu {

/// Words in device memory that launch_enter sets.
struct EnterWords {
  uint64_t* epoch;           ///< advanced by one
  uint64_t* also = nullptr;  ///< set to the same value
  /// Words by peer, set to the same value, but unchanged if the wait for that peer timed out.
  /// Copied to a signal, it says that data copied before it has arrived.
  uint64_t* signal_value = nullptr;
};

/// Advances the epoch, signals it to every other rank (signal `first` + this rank) and waits for
/// theirs: work enqueued before it has then ended on all ranks.
void launch_enter(const PeerTable& table, int first, const EnterWords& words,
                  const Deadline& deadline, OpId op, cudaStream_t stream);

/// Waits until this rank's signal `first` + peer has reached *epoch, for `peer` or, if that is -1,
/// for every other rank. With `advance`, *epoch is advanced first.
void launch_wait(const PeerTable& table, int first, int peer, uint64_t* epoch, bool advance,
                 const Deadline& deadline, OpId op, cudaStream_t stream);

/// Operation, peer and tile that the error of a wait names.
struct WaitName {
  OpId op;
  int peer;
  long long tile;
};
/// Waits until *signal, in this rank's memory, has reached `epoch`.
void launch_wait(const uint64_t* signal, uint64_t epoch, const WaitName& name,
                 const Deadline& deadline, cudaStream_t stream);

/// Keeps only the stream busy for `ns`.
void launch_pause(uint64_t ns, cudaStream_t stream);

}  // namespace tandem::gpu
