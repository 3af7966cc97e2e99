// Environment variables that CUDA and NCCL read once, at their first call, and that GPU ranks want
// set. The user's settings are retained.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tandem {

/// Hardware queues needed for branches of a graph and streams that wait for each other.
constexpr int kHardwareQueues = 32;

struct GpuEnvironment {
  std::vector<std::pair<std::string, std::string>> to_set;  ///< (name, value) of unset variables
  std::vector<std::string> warnings;  ///< one line for each variable set to a worse value
  bool graphs = true;                 ///< enough queues for a graph's branches
};

/// Value of a variable; nullptr if it is not set (as getenv). An empty value counts as not set.
using Lookup = std::function<const char*(const char* name)>;

/// Variables to set, and warnings with the cost of the user's other values.
GpuEnvironment gpu_environment(const Lookup& lookup);

/// Throws InvalidArgument if NCCL_NVLS_ENABLE asks for NVLink multicast: it needs rights over the
/// whole node's switches that a library must not assume.
void refuse_multicast(const Lookup& lookup);
/// Whether this value of NCCL_NVLS_ENABLE disables it in NCCL; nullptr: not set.
bool disables_multicast(const char* value);

}  // namespace tandem
