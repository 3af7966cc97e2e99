// Copies between device memory and the host, ordered by the communicator's stream. cudaMemcpy is
// not: it uses the default stream, which does not synchronize with that stream, and a copy to the
// device may still be in flight when cudaMemcpy returns.
#pragma once

#include <vector>

#include "comm/device/gpu_communicator.h"

namespace tandem::test {

/// Reads `count` values after all enqueued work. Blocks.
template <typename T>
std::vector<T> read(const gpu::GpuCommunicator& comm, const void* device, size_t count) {
  std::vector<T> host(count);
  comm.synchronize();  // a copy to pageable memory would wait with the context locked
  gpu::check(cudaMemcpyAsync(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost,
                             comm.stream()),
             "read device memory");
  comm.synchronize();
  return host;
}

/// Reads all of `tensor`, whose elements are stored as T.
template <typename T>
std::vector<T> read(const gpu::GpuCommunicator& comm, const Tensor& tensor) {
  return read<T>(comm, tensor.data(), size_t(tensor.bytes()) / sizeof(T));
}

/// Writes `host` to `device` before any work enqueued later. Blocks.
template <typename T>
void write(const gpu::GpuCommunicator& comm, void* device, const std::vector<T>& host) {
  comm.synchronize();
  gpu::check(cudaMemcpyAsync(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice,
                             comm.stream()),
             "write device memory");
  comm.synchronize();
}

}  // namespace tandem::test
