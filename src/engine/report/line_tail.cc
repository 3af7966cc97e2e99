#include "engine/report/line_tail.h"

#include <sys/stat.h>

#include "core/system/file_descriptor.h"
#include "core/system/files.h"

namespace tandem::report {
namespace {

constexpr size_t kBlock = size_t{1} << 20, kMaxLine = 4 * kBlock, kMaxRead = 64 * kBlock;

}  // namespace

bool LineTail::read(const std::function<void()>& clear,
                    const std::function<void(std::string_view)>& add) {
  if (!path_exists(path_)) return false;
  const FileDescriptor file = open_for_reading(path_, Source::no_link);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_errno(path_, "cannot be read");
  if (status.st_ino != inode_ || uint64_t(status.st_size) < offset_) {
    if (offset_ > 0) clear();
    inode_ = status.st_ino;
    offset_ = 0;
    partial_.clear();
    skips_ = false;
  }
  std::string block(kBlock, '\0');
  size_t all = 0;
  for (; all < kMaxRead;) {
    const size_t bytes = read_at(file.get(), path_, block.data(), kBlock, offset_);
    if (bytes == 0) break;
    offset_ += bytes;
    all += bytes;
    std::string_view rest(block.data(), bytes);
    for (size_t end; (end = rest.find('\n')) != std::string_view::npos;
         rest.remove_prefix(end + 1)) {
      partial_.append(rest.substr(0, end));
      if (!skips_ && partial_.size() <= kMaxLine) add(partial_);
      partial_.clear();
      skips_ = false;
    }
    partial_.append(rest);
    if (partial_.size() > kMaxLine) {
      partial_.clear();
      skips_ = true;
    }
  }
  return all > 0;
}

}  // namespace tandem::report
