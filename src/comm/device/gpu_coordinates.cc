#include "comm/device/gpu_coordinates.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "core/system/machine.h"

namespace tandem {

std::string node_identity(const char* host_id, std::string_view host_name,
                          std::string_view boot_id) {
  if (host_id && *host_id) return host_id;
  return fmt::format("{} {}", host_name, boot_id);
}

const std::string& this_node() {
  static const std::string node = [] {
    return node_identity(std::getenv("NCCL_HOSTID"), host_name(), boot_id());
  }();
  return node;
}

GpuPath path_to_all(std::span<const GpuCoordinates> ranks, int rank,
                    std::span<const std::string> visible,
                    const std::function<GpuPath(int device)>& path_to) {
  GpuPath all{true, true};
  const GpuCoordinates& local = ranks[size_t(rank)];
  for (const GpuCoordinates& peer : ranks) {
    if (peer.node == local.node && peer.gpu == local.gpu) continue;
    const auto device = std::ranges::find(visible, peer.gpu);
    if (peer.node != local.node || device == visible.end()) return {};
    const GpuPath path = path_to(int(device - visible.begin()));
    all = {all.reaches && path.reaches, all.atomics && path.atomics};
  }
  return all;
}

std::optional<SharedGpu> shared_gpu(std::span<const GpuCoordinates> ranks) {
  for (size_t second = 0; second < ranks.size(); ++second) {
    for (size_t first = 0; first < second; ++first) {
      if (ranks[first].gpu == ranks[second].gpu) return SharedGpu{int(first), int(second)};
    }
  }
  return std::nullopt;
}

}  // namespace tandem
