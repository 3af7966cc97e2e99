#include "comm/device/gpu_environment.h"

#include <fmt/format.h>

#include <cstdlib>
#include <string_view>

#include "tandem/error.h"

namespace tandem {
namespace {

constexpr const char* kMulticast = "NCCL_NVLS_ENABLE";

struct Wanted {
  const char* name;
  std::string value;
  bool (*fits)(std::string_view value);
  const char* cost;
};

// Parsed as NCCL and CUDA do: 0 if there is no number.
long number_of(std::string_view value) {
  return std::strtol(std::string(value).c_str(), nullptr, 0);
}

bool is_zero(std::string_view value) {
  return number_of(value) == 0;
}

bool has_queues(std::string_view value) {
  return number_of(value) >= kHardwareQueues;
}

const Wanted& wanted_queues() {
  static const Wanted queues{"CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(kHardwareQueues),
                             has_queues,
                             "streams share hardware queues: less overlaps, and calls are enqueued "
                             "step by step, not as CUDA graphs"};
  return queues;
}

std::vector<Wanted> wanted() {
  return {wanted_queues(),
          {"NCCL_RUNTIME_CONNECT", "0", is_zero,
           "NCCL connects at a collective's first call, which may wait behind a kernel that waits "
           "for it, until the deadline"},
          {"CUDA_MODULE_LOADING", "EAGER", [](std::string_view value) { return value == "EAGER"; },
           "a kernel of another library that is loaded at its first launch may wait for one that "
           "waits for a peer, until the deadline"}};
}

const char* value_of(const Lookup& lookup, const char* name) {
  const char* value = lookup(name);
  return value && *value ? value : nullptr;
}

}  // namespace

GpuEnvironment gpu_environment(const Lookup& lookup) {
  GpuEnvironment result;
  if (!value_of(lookup, kMulticast)) result.to_set.emplace_back(kMulticast, "0");
  for (const Wanted& variable : wanted()) {
    const char* value = value_of(lookup, variable.name);
    if (!value) {
      result.to_set.emplace_back(variable.name, variable.value);
    } else if (!variable.fits(value)) {
      result.warnings.push_back(fmt::format("{}={} is kept: Tandem would have set {}: {}",
                                            variable.name, value, variable.value, variable.cost));
    }
  }
  const char* queues = value_of(lookup, wanted_queues().name);
  result.graphs = !queues || has_queues(queues);
  return result;
}

bool disables_multicast(const char* value) {
  return value && *value && is_zero(value);
}

void refuse_multicast(const Lookup& lookup) {
  const char* value = value_of(lookup, kMulticast);
  if (!value || is_zero(value)) return;
  throw InvalidArgument(
      fmt::format("{}={}: expected 0, or not set: NVLink multicast stays off", kMulticast, value));
}

}  // namespace tandem
