// Signals as stream-ordered steps. Epochs live in device memory and are advanced by the kernels
// themselves, so a captured graph can be replayed.
#pragma once

#include <cuda_runtime_api.h>

#include "comm/nccl/device_signal.h"

namespace tandem::gpu {

/// Advances *epoch, tells every other rank through its signal `first` + own rank, and goes on once
/// every other rank has come this far: what was enqueued before it has then ended everywhere. With
/// `also`, *also becomes the new epoch too.
void launch_enter(const PeerTable& table, int first, uint64_t* epoch, const Watch& watch, OpId op,
                  cudaStream_t stream, uint64_t* also = nullptr);

/// Goes on once own signal `first` + peer has reached *epoch, for `peer` or, when that is -1, for
/// every other rank. With `advance`, *epoch is advanced first.
void launch_wait(const PeerTable& table, int first, int peer, uint64_t* epoch, bool advance,
                 const Watch& watch, OpId op, cudaStream_t stream);

/// Keeps the stream, and nothing else, busy for `ns`.
void launch_pause(uint64_t ns, cudaStream_t stream);

}  // namespace tandem::gpu
