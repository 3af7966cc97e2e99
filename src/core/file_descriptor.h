// An open file that closes itself, and positioned reads and writes on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace tandem {

class FileDescriptor {
 public:
  /// Throws IoError naming the path. Flags and mode as open(2): what others may do with a new file
  /// is for the user's umask to say.
  FileDescriptor(const std::string& path, int flags, int mode = 0666);
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor();
  int get() const { return fd_; }

 private:
  int fd_;
};

/// What may stand under a name that is read.
enum class Source : uint8_t {
  regular,  ///< a regular file: a FIFO would wait for a writer that never comes
  no_link,  ///< the same, but no symbolic link to one: it may be shown to others
  any       ///< also a pipe, a socket or a character device, as a user may name for one's own input
};

/// Opens for reading. Throws IoError naming the path and what was found there instead.
FileDescriptor open_for_reading(const std::string& path, Source source = Source::regular);

/// Bytes in the open file `path`.
uint64_t file_size(int fd, const std::string& path);
/// Bytes read, fewer than asked for only at the file's end. Throws IoError naming `path`.
size_t read_at(int fd, const std::string& path, void* data, size_t bytes, uint64_t offset);
/// Writes all of it or throws IoError naming `path`.
void write_at(int fd, const std::string& path, const void* data, size_t bytes, uint64_t offset);

}  // namespace tandem
