// Owners of streams, events and memory. Made on the current device; freed without throwing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>

#include "core/cuda/check.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

namespace detail {
struct DestroyStream {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
struct FreeDevice {
  void operator()(void* memory) const { cudaFree(memory); }
};
struct FreeHost {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
template <typename Handle, typename Destroy>
using Owner = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy>;
}  // namespace detail

enum class Priority { normal, high };

class Stream {
 public:
  explicit Stream(Priority priority = Priority::normal) {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                       priority == Priority::high ? greatest : least),
          "create a stream");
    owner_.reset(stream);
  }
  cudaStream_t get() const { return owner_.get(); }

 private:
  detail::Owner<cudaStream_t, detail::DestroyStream> owner_;
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

/// Microseconds between two timing events that have completed.
inline double microseconds(const Event& begin, const Event& end) {
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "time between events");
  return double(ms) * 1e3;
}

/// Device memory on the current device, zeroed.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(size_t bytes) : bytes_(bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes ? bytes : 1),
          ("allocate " + std::to_string(bytes) + " bytes of device memory").c_str());
    owner_.reset(static_cast<std::byte*>(memory));
    check(cudaMemset(memory, 0, bytes), "clear device memory");
    check(cudaDeviceSynchronize(), "clear device memory");
    check(cudaGetDevice(&device_), "current device");
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

/// One T in pinned host memory that kernels reach through the same address.
template <typename T>
class Mapped {
 public:
  Mapped() {
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable),
          "allocate mapped host memory");
    owner_.reset(new (memory) T{});
  }
  T* get() const { return owner_.get(); }

 private:
  std::unique_ptr<T, detail::FreeHost> owner_;
};

}  // namespace tandem::gpu
