#include "comm/device/adopted_nccl.h"

#include <fmt/format.h>

namespace tandem {

std::string refusal_of(const AdoptedNccl& adopted, const WorldOptions& options,
                       const char* users_nvls) {
  if (options.ranks != 1 && options.ranks != adopted.size) {
    return fmt::format("ranks {}: the communicator has {}: expected {} or none given",
                       options.ranks, adopted.size, adopted.size);
  }
  if (options.ranks_per_gpu != 1) {
    return fmt::format("{} ranks a GPU: expected 1, as NCCL's ranks have a GPU each",
                       options.ranks_per_gpu);
  }
  if (options.link) {
    return fmt::format("link '{}': expected none: only ranks that share a GPU emulate one",
                       options.link->describe());
  }
  if (adopted.current_device != adopted.device) {
    return fmt::format("the current device is cuda:{}: expected the communicator's, cuda:{}",
                       adopted.current_device, adopted.device);
  }
  if (adopted.stream_device != adopted.device) {
    return fmt::format("a stream of cuda:{}: expected one of the communicator's GPU, cuda:{}",
                       adopted.stream_device, adopted.device);
  }
  if (adopted.captured)
    return "a stream that is captured into a graph: expected it before or after";
  if (adopted.size > 1 && adopted.multicast && !disables_multicast(users_nvls)) {
    return fmt::format(
        "NCCL_NVLS_ENABLE is {}, and this GPU has NVLink multicast, which stays off: expected 0 in "
        "the environment before NCCL's first call",
        users_nvls && *users_nvls ? users_nvls : "not set");
  }
  return {};
}

}  // namespace tandem
