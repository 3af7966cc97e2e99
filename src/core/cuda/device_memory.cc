#include "core/device_memory.h"

#include <fmt/format.h>

#include "core/cuda/handles.h"
#include "tandem/error.h"

namespace tandem {

std::shared_ptr<std::byte> allocate_on_gpu(size_t bytes, Device device) {
  auto share = gpu::this_share();
  if (share->device() != device.index) {
    throw InvalidArgument(fmt::format("memory of GPU {}: expected this rank's GPU {}", device.index,
                                      share->device()));
  }
  return {share->allocate(bytes),
          [share, bytes](std::byte* memory) { share->free(memory, bytes); }};
}

void copy_bytes(const Exec& exec, const void* from, void* to, size_t bytes) {
  gpu::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, exec.stream), "copy memory");
  wait_for_stream(exec);
}

void wait_for_stream(const Exec& exec) {
  gpu::check(cudaStreamSynchronize(exec.stream), "wait for the stream");
}

void clear_bytes(const Exec& exec, void* memory, size_t bytes) {
  gpu::check(cudaMemsetAsync(memory, 0, bytes, exec.stream), "clear memory");
}

}  // namespace tandem
