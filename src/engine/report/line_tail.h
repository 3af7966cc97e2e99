// Lines of a text file that grows, or that is written anew.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace tandem::report {

class LineTail {
 public:
  explicit LineTail(std::string path) : path_(std::move(path)) {}

  /// Calls `add` for each line that was completed since the last call, of at most 64 MiB in all;
  /// before them `clear` if the file was replaced or has become shorter. Lines of more than 4 MiB
  /// are skipped. Returns whether anything was read. A file that is not there has no lines. Throws
  /// IoError for one that cannot be read.
  bool read(const std::function<void()>& clear, const std::function<void(std::string_view)>& add);

 private:
  std::string path_;
  ino_t inode_ = 0;
  uint64_t offset_ = 0;  // of what was read
  std::string partial_;  // begin of the next line
  bool skips_ = false;   // the rest of a line that is too long
};

}  // namespace tandem::report
