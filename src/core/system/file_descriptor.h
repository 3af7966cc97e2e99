// Owned file descriptor, and positioned reads and writes on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace tandem {

class FileDescriptor {
 public:
  /// Throws IoError with the path. Flags and mode as open(2); the user's umask decides the
  /// permissions of a new file.
  FileDescriptor(const std::string& path, int flags, int mode = 0666);
  /// Takes an open descriptor, or -1.
  explicit FileDescriptor(int fd) : fd_(fd) {}
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

/// Kinds of file accepted for reading.
enum class Source : uint8_t {
  regular,  ///< a regular file: opening a FIFO could wait for a writer forever
  no_link,  ///< a regular file, not a symbolic link: for content shown to others
  any       ///< also a pipe, a socket or a character device, such as a user may name as input
};

/// Opens for reading. Throws IoError with the path and the kind of file found instead.
FileDescriptor open_for_reading(const std::string& path, Source source = Source::regular);

/// Size in bytes of the open file `path`.
uint64_t file_size(int fd, const std::string& path);
/// Returns the bytes read, fewer than requested only at end of file. Throws IoError with `path`.
size_t read_at(int fd, const std::string& path, void* data, size_t bytes, uint64_t offset);
/// Writes all of `data`. Throws IoError with `path`.
void write_at(int fd, const std::string& path, const void* data, size_t bytes, uint64_t offset);
/// Writes `text` at the end of a file opened with O_APPEND, or at its position, and erases from
/// `text` what has been written, also if it throws an IoError with `path`.
void append_to(int fd, const std::string& path, std::string& text);

}  // namespace tandem
