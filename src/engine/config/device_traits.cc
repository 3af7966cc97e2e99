#include "engine/config/device_traits.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem {

const DeviceTraits& device_traits(const Exec& exec) {
  static constexpr DeviceTraits kHost{.memory = "this process", .is_host = true};
  static constexpr DeviceTraits kGpu{"use on the GPU", false, DType::bf16, DType::bf16};
  return exec.on_gpu() ? kGpu : kHost;
}

void refuse_on_gpu(const Exec& exec, std::string_view what, std::string_view expected) {
  if (device_traits(exec).is_host) return;
  throw Unsupported(fmt::format("{} on GPUs: expected {}", what, expected));
}

}  // namespace tandem
