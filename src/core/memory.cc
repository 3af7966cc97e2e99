#include <fmt/format.h>

#include <cstdlib>
#include <cstring>

#include "core/device_memory.h"
#include "core/out_of_memory.h"
#include "tandem/error.h"
#include "tandem/tensor.h"

namespace tandem {
namespace {

std::shared_ptr<std::byte> on_host(size_t bytes) {
  const size_t rounded = (bytes + 63) / 64 * 64 + 64;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(64, rounded));
  if (!memory) throw OutOfMemory(bytes);
  std::memset(memory, 0, rounded);
  return {memory, [](std::byte* p) { std::free(p); }};
}

}  // namespace

Memory::Memory(size_t bytes, Device device)
    : data_(device.kind == DeviceKind::cuda ? allocate_on_gpu(bytes, device) : on_host(bytes)),
      bytes_(bytes),
      device_(device) {}

Tensor Memory::view(DType dtype, std::initializer_list<int64_t> shape, size_t offset) const {
  const Tensor tensor(data_.get() + offset, dtype, shape, device_);
  if (offset + tensor.bytes() > bytes_) {
    throw InvalidArgument(
        fmt::format("view {} at byte {}: memory has {} bytes", tensor.describe(), offset, bytes_));
  }
  return tensor;
}

}  // namespace tandem
