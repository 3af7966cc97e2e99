#include "comm/world/device_choice.h"

#include <fmt/format.h>

#include <algorithm>

namespace tandem {
namespace {

constexpr const char* kArchitecture = "sm_90";

/// Reason that the ranks cannot be GPUs of this machine, or empty.
std::string find_obstacle(const Gpus& gpus, const DeviceRequest& request) {
  if (!request.cpu_only.empty()) return request.cpu_only;
  if (!request.one_host) return "ranks on several hosts: --device gpu uses their GPUs";
  const bool shares = request.ranks_per_gpu > 1;
  if (request.ranks > (shares ? request.ranks_per_gpu : gpus.count)) {
    return shares ? fmt::format("{} ranks, {} a GPU", request.ranks, request.ranks_per_gpu)
                  : fmt::format("{} ranks need a GPU each", request.ranks);
  }
  for (int device = 0; device < (shares ? 1 : request.ranks); ++device) {
    const std::string& architecture = gpus.architectures.at(size_t(device));
    if (architecture != kArchitecture) {
      return fmt::format("GPU {} is {}: expected {}", device, architecture, kArchitecture);
    }
  }
  const double need = request.rank_bytes * (shares ? request.ranks : 1) / double(1 << 30);
  if (need <= gpus.memory_gib) return "";
  return fmt::format("needs {:.0f} GiB of a GPU, which has {:.0f}", need, gpus.memory_gib);
}

}  // namespace

DeviceChoice choose_device(const Gpus& gpus, const DeviceRequest& request,
                           const std::string& cpu_option) {
  if (gpus.count == 0) {
    return {false, gpus.missing.empty() ? "" : fmt::format("device: cpu ({})", gpus.missing)};
  }
  if (const std::string why = find_obstacle(gpus, request); !why.empty()) {
    return {false, fmt::format("device: cpu ({} not used: {})", gpus.describe(gpus.count), why)};
  }
  const bool shares = request.ranks_per_gpu > 1;
  return {
      true,
      fmt::format("device: gpu ({}{}); {} uses the CPU", gpus.describe(shares ? 1 : request.ranks),
                  shares ? fmt::format(", shared by {} ranks", request.ranks) : "", cpu_option)};
}

}  // namespace tandem
