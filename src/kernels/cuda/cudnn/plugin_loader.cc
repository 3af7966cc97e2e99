#include "kernels/cuda/cudnn/plugin_loader.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>

#include "core/system/process/data_file.h"

namespace tandem::gpu {
namespace {

namespace fs = std::filesystem;
constexpr const char* kFile = "tandem_cudnn.so";

/// Empty if not found.
fs::path find_plugin() {
  const fs::path folder = library_folder();
  for (const fs::path& each : {folder, folder / "../lib", fs::path(TANDEM_PLUGIN_DIR)}) {
    std::error_code error;
    const fs::path file = (each / kFile).lexically_normal();
    if (!each.empty() && fs::exists(file, error)) return file;
  }
  return {};
}

std::string version_text(size_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

/// Reason why a cuDNN is not used, or "".
std::string version_problem(const TandemCudnn& cudnn) {
  const std::string running = version_text(cudnn.running_version);
  if (cudnn.running_version < cudnn.compiled_version) {
    return fmt::format("cuDNN {}: expected at least {}, which this build was compiled with",
                       running, version_text(cudnn.compiled_version));
  }
  if (cudnn.running_version == 91000 || cudnn.running_version == 91001) {
    return fmt::format("cuDNN {}: its attention has known bugs", running);
  }
  return "";
}

CudnnPlugin open_plugin() {
  const auto absent = [](const std::string& reason) { return CudnnPlugin{nullptr, "", reason}; };
  const fs::path file = find_plugin();
  if (file.empty()) return absent(fmt::format("{} is not installed", kFile));
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    return absent(
        fmt::format("{} (expected the folders of cuDNN and NVRTC in LD_LIBRARY_PATH)", dlerror()));
  }
  const auto exported = reinterpret_cast<decltype(&tandem_cudnn)>(dlsym(library, "tandem_cudnn"));
  if (!exported || exported()->interface_version != kTandemCudnnInterface) {
    return absent(fmt::format("{} is not of this build", file.string()));
  }
  const TandemCudnn& cudnn = *exported();
  if (const std::string problem = version_problem(cudnn); !problem.empty()) return absent(problem);
  return {&cudnn,
          fmt::format("{} (compiled with {})", version_text(cudnn.running_version),
                      version_text(cudnn.compiled_version)),
          ""};
}

}  // namespace

const CudnnPlugin& cudnn_plugin() {
  static const CudnnPlugin plugin = open_plugin();
  return plugin;
}

}  // namespace tandem::gpu
