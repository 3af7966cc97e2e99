// RAII owners of streams, events and memory, created from this thread's share of a GPU (share.h);
// destruction does not throw.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>

#include "core/cuda/check.h"
#include "core/cuda/share.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

namespace detail {
struct DestroyStream {
  std::shared_ptr<GpuShare> share;
  void operator()(cudaStream_t stream) const { share->destroy_stream(stream); }
};
struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
struct FreeDevice {
  std::shared_ptr<GpuShare> share;
  size_t bytes = 0;
  void operator()(std::byte* memory) const { share->free(memory, bytes); }
};
template <typename T>
struct FreeHost {
  std::shared_ptr<GpuShare> share;
  void operator()(T* memory) const { share->free_host(memory, sizeof(T)); }
};
template <typename Handle, typename Destroy>
using Owner = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy>;
}  // namespace detail

class Stream {
 public:
  explicit Stream(Priority priority = Priority::normal) : owner_(make(priority)) {}
  cudaStream_t get() const { return owner_.get(); }

 private:
  using Owner = detail::Owner<cudaStream_t, detail::DestroyStream>;
  static Owner make(Priority priority) {
    const auto share = this_share();
    return {share->make_stream(priority), {share}};
  }
  Owner owner_;
};

class Event {
 public:
  enum class Kind { ordering, timing };
  explicit Event(Kind kind = Kind::ordering) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(
              &event, kind == Kind::timing ? cudaEventDefault : cudaEventDisableTiming),
          "create an event");
    owner_.reset(event);
  }
  cudaEvent_t get() const { return owner_.get(); }
  void record(cudaStream_t stream) { check(cudaEventRecord(get(), stream), "record an event"); }
  void block(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, get(), 0), "wait for an event");
  }

 private:
  detail::Owner<cudaEvent_t, detail::DestroyEvent> owner_;
};

/// Microseconds between two completed timing events.
inline double microseconds(const Event& begin, const Event& end) {
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "time between events");
  return double(ms) * 1e3;
}

/// Zero-initialized device memory on the current device.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(size_t bytes) : bytes_(bytes) {
    const auto share = this_share();
    owner_ = {share->allocate(bytes), {share, bytes}};
    device_ = share->device();
  }
  std::byte* data() const { return owner_.get(); }
  size_t bytes() const { return bytes_; }
  Tensor view(DType dtype, std::initializer_list<int64_t> shape) const {
    const Tensor tensor(data(), dtype, shape, {DeviceKind::cuda, device_});
    if (tensor.bytes() > bytes_) {
      throw InvalidArgument("view " + tensor.describe() + ": device memory has " +
                            std::to_string(bytes_) + " bytes");
    }
    return tensor;
  }

 private:
  std::unique_ptr<std::byte, detail::FreeDevice> owner_;
  size_t bytes_ = 0;
  int device_ = 0;
};

/// One T in pinned host memory, mapped at the same address for kernels.
template <typename T>
class Mapped {
 public:
  Mapped() {
    const auto share = this_share();
    owner_ = {new (share->allocate_host(sizeof(T))) T{}, {share}};
  }
  T* get() const { return owner_.get(); }

 private:
  std::unique_ptr<T, detail::FreeHost<T>> owner_;
};

}  // namespace tandem::gpu
