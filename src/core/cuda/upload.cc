#include "core/cuda/upload.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/cuda/common_stream.h"

namespace tandem::gpu {
namespace {

/// Pinned memory, kept until copies from it are done. An ordinary free would wait for all streams
/// of the rank.
template <typename T>
class Staging {
 public:
  Staging() : share_(this_share()), memory_(share_->allocate_host(sizeof(T))) {}
  ~Staging() { share_->free_idle_host(memory_, sizeof(T)); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  T* get() const { return static_cast<T*>(memory_); }

 private:
  std::shared_ptr<GpuShare> share_;
  void* memory_;
};

}  // namespace

DeviceMemory uploaded(const void* host, size_t bytes) {
  DeviceMemory memory(bytes);
  if (this_share()->alone()) {
    check(cudaMemcpy(memory.data(), host, bytes, cudaMemcpyDefault), "write a table");
    check(cudaStreamSynchronize(cudaStreamLegacy), "write a table");  // the copy may still be in
                                                                      // flight
    return memory;
  }
  // A copy from pageable memory waits with the context locked: a rank that shares the GPU could
  // then not enqueue work that this rank's kernels wait for.
  using Chunk = std::array<std::byte, 64 << 10>;
  const Staging<Chunk> staging;
  const CommonStream stream(Common::prompt);
  for (size_t at = 0; at < bytes; at += sizeof(Chunk)) {
    const size_t chunk = std::min(sizeof(Chunk), bytes - at);
    std::memcpy(staging.get()->data(), static_cast<const std::byte*>(host) + at, chunk);
    check(cudaMemcpyAsync(memory.data() + at, staging.get()->data(), chunk, cudaMemcpyDefault,
                          stream.get()),
          "write a table");
    check(cudaStreamSynchronize(stream.get()), "write a table");
  }
  return memory;
}

}  // namespace tandem::gpu
