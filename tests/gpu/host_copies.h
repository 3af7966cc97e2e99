// Copies between device memory and the host in the order of the communicator's stream. cudaMemcpy
// is not: that stream does not wait for the default one, nor the default one for it, and a copy to
// the device may still be under way when cudaMemcpy returns.
#pragma once

#include <vector>

#include "comm/device/gpu_communicator.h"

namespace tandem::test {

/// `count` values behind everything that was enqueued. Blocks.
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

/// All of `tensor`, whose elements are stored as T.
template <typename T>
std::vector<T> read(const gpu::GpuCommunicator& comm, const Tensor& tensor) {
  return read<T>(comm, tensor.data(), size_t(tensor.bytes()) / sizeof(T));
}

/// What is enqueued next finds `host` at `device`. Blocks.
template <typename T>
void write(const gpu::GpuCommunicator& comm, void* device, const std::vector<T>& host) {
  comm.synchronize();
  gpu::check(cudaMemcpyAsync(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice,
                             comm.stream()),
             "write device memory");
  comm.synchronize();
}

}  // namespace tandem::test
