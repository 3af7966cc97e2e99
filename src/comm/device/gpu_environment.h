// Variables that CUDA and NCCL read once, at their first call, and that GPU ranks want set. What
// the user has set is kept.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tandem {

/// Hardware queues that branches of a graph and streams that wait for each other need.
constexpr int kHardwareQueues = 32;

struct GpuEnvironment {
  std::vector<std::pair<std::string, std::string>> to_set;  ///< name and value; not set so far
  std::vector<std::string> warnings;  ///< one line for each that is set to something worse
  bool graphs = true;                 ///< there are queues enough for a graph's branches
};

/// The value of a variable, nullptr where it is not set (as getenv). An empty one counts as that.
using Lookup = std::function<const char*(const char* name)>;

/// What is missing, and what the rest costs.
GpuEnvironment gpu_environment(const Lookup& lookup);

/// NVLink multicast needs rights over the whole node's switches that a library must not assume:
/// throws InvalidArgument where NCCL_NVLS_ENABLE asks for it.
void refuse_multicast(const Lookup& lookup);
/// Whether NCCL leaves it out with this value of NCCL_NVLS_ENABLE; nullptr: not set.
bool turns_multicast_off(const char* value);

}  // namespace tandem
