// An open file that closes itself, and positioned writes on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tandem {

class FileDescriptor {
 public:
  /// Throws IoError naming the path. Flags and mode as open(2).
  FileDescriptor(const std::string& path, int flags, int mode = 0);
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor();
  int get() const { return fd_; }

 private:
  int fd_;
};

/// Writes all of it or throws IoError naming `path`.
void write_at(int fd, const std::string& path, const void* data, size_t bytes, uint64_t offset);

}  // namespace tandem
