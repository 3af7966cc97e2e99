#include "core/system/process/data_file.h"

#include <dlfcn.h>

namespace tandem {

namespace {

namespace fs = std::filesystem;

}  // namespace

fs::path library_folder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&data_file), &info) == 0 || !info.dli_fname) return {};
  std::error_code error;
  fs::path file = fs::canonical(info.dli_fname, error);
  // For a program, dli_fname is argv[0], which may not be a path.
  if (error) file = fs::canonical("/proc/self/exe", error);
  return error ? fs::path() : file.parent_path();
}

std::string data_file(std::string_view name) {
  std::error_code error;
  if (const fs::path folder = library_folder(); !folder.empty()) {
    for (const char* below : {"../share/tandem", "../../share/tandem", "share/tandem"}) {
      const fs::path path = (folder / below / name).lexically_normal();
      if (fs::exists(path, error)) return path.string();
    }
  }
  const fs::path path = fs::path(TANDEM_DATA_DIR) / name;
  return fs::exists(path, error) ? path.string() : "";
}

}  // namespace tandem
