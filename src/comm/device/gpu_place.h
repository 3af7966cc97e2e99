// Where a rank's GPU is, and which of the world's GPUs reach each other. CUDA is asked by who
// calls.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// What NCCL, too, tells nodes apart by: NCCL_HOSTID where it is given, else the host name and the
/// identity of the running kernel, as two machines may have one name.
std::string node_identity(const char* host_id, std::string_view host_name,
                          std::string_view boot_id);
/// The same of this process.
std::string this_node();

struct GpuPlace {
  std::string node;
  std::string gpu;  ///< the same in every process, however each numbers its GPUs
};

/// Of two GPUs.
struct GpuPath {
  bool reaches = false;  ///< loads and stores reach the other's memory
  bool atomics = false;  ///< so do atomic additions
};

/// From rank `rank`'s GPU to those of all other ranks, at the least. `visible`: the GPUs that its
/// process sees, by index; `path_to` asks for the path from the own one to one of these. A GPU that
/// the process does not see, or of another node, is not reached. GPUs of no rank do not count.
GpuPath path_to_all(std::span<const GpuPlace> ranks, int rank, std::span<const std::string> visible,
                    const std::function<GpuPath(int device)>& path_to);

/// The first two ranks that have the same GPU.
struct SharedGpu {
  int first, second;
};
std::optional<SharedGpu> shared_gpu(std::span<const GpuPlace> ranks);

}  // namespace tandem
