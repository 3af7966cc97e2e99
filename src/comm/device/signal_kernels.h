// Signals as stream-ordered steps. Epochs live in device memory and are advanced by the kernels
// themselves, so a captured graph can be replayed.
#pragma once

#include <cuda_runtime_api.h>

#include "comm/device/device_signal.h"

namespace tandem::gpu {

/// Words in device memory that entering sets.
struct EnterWords {
  uint64_t* epoch;           ///< is advanced
  uint64_t* also = nullptr;  ///< becomes the same
  /// By peer: the same, or as it was where the wait for that peer timed out. Copied to a signal, it
  /// says that what was copied before it is there.
  uint64_t* signal_value = nullptr;
};

/// Advances the epoch, signals it to every other rank (signal `first` + own rank), and goes on
/// once every other rank has come this far: what was enqueued before it has then ended everywhere.
void launch_enter(const PeerTable& table, int first, const EnterWords& words, const Watch& watch,
                  OpId op, cudaStream_t stream);

/// Goes on once own signal `first` + peer has reached *epoch, for `peer` or, when that is -1, for
/// every other rank. With `advance`, *epoch is advanced first.
void launch_wait(const PeerTable& table, int first, int peer, uint64_t* epoch, bool advance,
                 const Watch& watch, OpId op, cudaStream_t stream);

/// Keeps the stream, and nothing else, busy for `ns`.
void launch_pause(uint64_t ns, cudaStream_t stream);

}  // namespace tandem::gpu
