// Device memory that is freed and allocated anew, from each source that callers use.
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>

#include "core/cuda/driver.h"

namespace tandem::test {

enum class From {
  allocation,    ///< cudaMalloc
  pool,          ///< cudaMallocAsync
  trimmed_pool,  ///< cudaMallocAsync; freed memory returns to the system
  mapping        ///< memory mapped at an address that stays reserved
};
inline constexpr std::array kEveryAllocation{From::allocation, From::pool, From::trimmed_pool,
                                             From::mapping};

inline const char* name_of(From from) {
  return std::array{"allocation", "pool", "trimmed pool", "mapping"}[size_t(from)];
}

/// Physical memory at a reserved address.
class Mapping {
  template <typename F>
  static F driver(const char* name) {
    return gpu::driver_function<F>(name);
  }

 public:
  Mapping() {
    int device = 0;
    gpu::check(cudaGetDevice(&device), "current device");
    property_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    property_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    property_.location.id = device;
  }
  size_t granularity() const {
    size_t bytes = 0;
    const auto get =
        driver<decltype(&cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity");
    gpu::check_driver(get(&bytes, &property_, CU_MEM_ALLOC_GRANULARITY_MINIMUM), "granularity");
    return bytes;
  }
  CUdeviceptr reserve(size_t bytes) const {
    CUdeviceptr at = 0;
    const auto reserve = driver<decltype(&cuMemAddressReserve)>("cuMemAddressReserve");
    gpu::check_driver(reserve(&at, bytes, 0, 0, 0), "cuMemAddressReserve");
    return at;
  }
  void map(CUdeviceptr at, size_t bytes) const {
    CUmemGenericAllocationHandle handle{};
    const auto create = driver<decltype(&cuMemCreate)>("cuMemCreate");
    gpu::check_driver(create(&handle, bytes, &property_, 0), "cuMemCreate");
    const auto map = driver<decltype(&cuMemMap)>("cuMemMap");
    gpu::check_driver(map(at, bytes, 0, handle, 0), "cuMemMap");
    const auto release = driver<decltype(&cuMemRelease)>("cuMemRelease");
    gpu::check_driver(release(handle), "cuMemRelease");
    CUmemAccessDesc access{};
    access.location = property_.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const auto allow = driver<decltype(&cuMemSetAccess)>("cuMemSetAccess");
    gpu::check_driver(allow(at, bytes, &access, 1), "cuMemSetAccess");
  }
  void unmap(CUdeviceptr at, size_t bytes) const {
    gpu::check_driver(driver<decltype(&cuMemUnmap)>("cuMemUnmap")(at, bytes), "cuMemUnmap");
  }
  void release(CUdeviceptr at, size_t bytes) const {
    driver<decltype(&cuMemAddressFree)>("cuMemAddressFree")(at, bytes);
  }

 private:
  CUmemAllocationProp property_{};
};

/// Does no synchronization: no pending work may use it.
class RenewedMemory {
 public:
  RenewedMemory(From from, size_t bytes) : from_(from), bytes_(bytes) {
    if (from_ == From::mapping) {
      const size_t granularity = mapping_.granularity();
      bytes_ = (bytes + granularity - 1) / granularity * granularity;
      reserved_ = mapping_.reserve(bytes_);
    }
    take();
  }
  /// A failure here ends the test program.
  ~RenewedMemory() {
    give_back();
    if (reserved_ != 0) mapping_.release(reserved_, bytes_);
  }
  RenewedMemory(const RenewedMemory&) = delete;
  RenewedMemory& operator=(const RenewedMemory&) = delete;
  void renew() {
    give_back();
    take();
  }
  void* data() const { return memory_; }

 private:
  void take() {
    switch (from_) {
      case From::allocation:
        return gpu::check(cudaMalloc(&memory_, bytes_), "cudaMalloc");
      case From::pool:
      case From::trimmed_pool:
        gpu::check(cudaMallocAsync(&memory_, bytes_, cudaStreamPerThread), "cudaMallocAsync");
        return gpu::check(cudaStreamSynchronize(cudaStreamPerThread), "cudaMallocAsync");
      case From::mapping:
        mapping_.map(reserved_, bytes_);
        memory_ = reinterpret_cast<void*>(reserved_);
    }
  }
  void give_back() {
    switch (from_) {
      case From::allocation:
        return gpu::check(cudaFree(memory_), "cudaFree");
      case From::pool:
      case From::trimmed_pool:
        gpu::check(cudaFreeAsync(memory_, cudaStreamPerThread), "cudaFreeAsync");
        gpu::check(cudaStreamSynchronize(cudaStreamPerThread), "cudaFreeAsync");
        if (from_ == From::trimmed_pool) trim();
        return;
      case From::mapping:
        mapping_.unmap(reserved_, bytes_);
    }
  }
  static void trim() {
    int device = 0;
    cudaMemPool_t pool = nullptr;
    gpu::check(cudaGetDevice(&device), "current device");
    gpu::check(cudaDeviceGetDefaultMemPool(&pool, device), "the device's pool");
    gpu::check(cudaMemPoolTrimTo(pool, 0), "trim a pool");
  }

  From from_;
  size_t bytes_;
  Mapping mapping_;
  CUdeviceptr reserved_ = 0;
  void* memory_ = nullptr;
};

}  // namespace tandem::test
