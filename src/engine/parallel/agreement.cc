#include "engine/parallel/agreement.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <filesystem>
#include <span>
#include <vector>

#include "core/system/files.h"
#include "core/system/machine.h"
#include "tandem/error.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

/// Three lines: machine, location (inode of the deepest existing folder and the remaining path),
/// and the absolute path.
std::string location(const std::string& path) {
  std::error_code code;
  const fs::path whole = fs::absolute(path, code).lexically_normal();
  fs::path there = whole;
  struct stat status {};
  while (::stat(there.c_str(), &status) != 0 && there != there.parent_path()) {
    there = there.parent_path();
  }
  return fmt::format("{}\n{}:{}:{}\n{}", boot_id(), uint64_t(status.st_dev),
                     uint64_t(status.st_ino), whole.lexically_relative(there).string(),
                     whole.string());
}

std::vector<std::string> split_location(const std::vector<std::byte>& blob) {
  const std::string_view text(reinterpret_cast<const char*>(blob.data()), blob.size());
  const size_t first = text.find('\n'), second = text.find('\n', first + 1);
  return {std::string(text.substr(0, first)),
          std::string(text.substr(first + 1, second - first - 1)),
          std::string(text.substr(second + 1))};
}

}  // namespace

void require_same_location(Communicator& world, std::string_view what, const std::string& path) {
  const std::string local = location(path);
  std::vector<std::vector<std::string>> all;
  for (const auto& blob : world.exchange(std::as_bytes(std::span(local)), what)) {
    all.push_back(split_location(blob));
    for (size_t rank = 0; rank + 1 < all.size(); ++rank) {
      const auto &remote = all[rank], &last = all.back();
      if (remote[0] != last[0] || remote[1] == last[1]) continue;
      throw Mismatch(
          fmt::format("{}: rank {} means {}, rank {} means {}: expected the same on all "
                      "ranks of a machine",
                      what, rank, remote[2], all.size() - 1, last[2]));
    }
  }
}

}  // namespace tandem
