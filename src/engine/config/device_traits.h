// Differences between kinds of devices that the engine's settings, checks and messages read.
#pragma once

#include <optional>
#include <string_view>

#include "core/exec.h"

namespace tandem {

struct DeviceTraits {
  const char* memory;  ///< whose bytes memory_in_use counts
  /// CPU ranks: their memory is the machine's, they look for messages between operators, count the
  /// bytes of layers, and predict a step's terms from measured costs.
  bool is_host;
  std::optional<DType> auto_dtype = {};  ///< of train.dtype auto; nullopt: the faster one
  DType validated_experts = DType::f32;  ///< dtype in which models with experts are validated
};
const DeviceTraits& device_traits(const Exec& exec);

/// Throws Unsupported, "WHAT on GPUs: expected EXPECTED", if exec is on a GPU.
void refuse_on_gpu(const Exec& exec, std::string_view what, std::string_view expected);

}  // namespace tandem
