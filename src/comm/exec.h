// Exec of a rank's kernels.
#pragma once

#include "core/exec.h"
#include "tandem/cuda.h"

namespace tandem {

/// The calling thread's CPU threads, or the rank's GPU and current stream.
inline Exec make_exec(Communicator& comm) {
  return comm.on_gpu() ? Exec{device_of(comm), stream_of(comm)} : Exec{};
}

}  // namespace tandem
