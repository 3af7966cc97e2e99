// Exec of a rank's kernels.
#pragma once

#include "core/exec.h"
#include "tandem/cuda.h"

namespace tandem {

/// The calling thread's CPU threads, or the rank's GPU and current stream.
inline Exec make_exec(Communicator& comm) {
  return comm.on_gpu() ? Exec{device_of(comm), stream_of(comm)} : Exec{};
}

/// Enqueues later calls of `comm` on exec's stream, which must outlive it. On a CPU nothing is
/// done.
inline void set_exec(Communicator& comm, const Exec& exec) {
  if (exec.on_gpu()) set_stream(comm, exec.stream);
}

}  // namespace tandem
