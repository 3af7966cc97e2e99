// Node and GPU of each rank, and which of the world's GPUs reach each other. Does not call CUDA:
// the caller passes what it reports.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// Identity by which NCCL, too, distinguishes nodes: NCCL_HOSTID if set, else the host name and the
/// boot id of the running kernel, as two machines may have the same name.
std::string node_identity(const char* host_id, std::string_view host_name,
                          std::string_view boot_id);
/// Identity of the node of this process, as its environment was at the first call.
const std::string& this_node();

struct GpuCoordinates {
  std::string node;
  std::string gpu;  ///< equal in every process, however each numbers its GPUs
};

/// Capabilities between two GPUs.
struct GpuPath {
  bool reaches = false;  ///< loads and stores reach the other GPU's memory
  bool atomics = false;  ///< atomic additions reach it too
};

/// Capabilities common to the paths from rank `rank`'s GPU to the GPUs of all other ranks.
/// `visible`: the GPUs that its process sees, by index; `path_to` returns the path from this rank's
/// GPU to one of them. A GPU that the process does not see, or of another node, is not reached.
/// GPUs without a rank are ignored.
GpuPath path_to_all(std::span<const GpuCoordinates> ranks, int rank,
                    std::span<const std::string> visible,
                    const std::function<GpuPath(int device)>& path_to);

/// First two ranks that have the same GPU.
struct SharedGpu {
  int first, second;
};
std::optional<SharedGpu> shared_gpu(std::span<const GpuCoordinates> ranks);

}  // namespace tandem
