#include "core/cuda/allocation.h"

#include "core/cuda/driver.h"

namespace tandem::gpu {
namespace {

uint64_t allocation_at(const void* byte) {
  static const auto get =
      driver_function<decltype(&cuPointerGetAttribute)>("cuPointerGetAttribute");
  unsigned long long id = 0;
  const CUresult code =
      get(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, reinterpret_cast<CUdeviceptr>(byte));
  return code == CUDA_SUCCESS ? id : 0;
}

}  // namespace

uint64_t allocation_of(const void* memory, size_t bytes) {
  const uint64_t first = allocation_at(memory);
  return allocation_at(static_cast<const std::byte*>(memory) + bytes - 1) == first ? first : 0;
}

}  // namespace tandem::gpu
