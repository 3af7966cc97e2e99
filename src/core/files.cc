#include "core/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/file_descriptor.h"
#include "tandem/error.h"

namespace tandem {

void throw_errno(const std::string& path, std::string_view what) {
  throw IoError(fmt::format("{}: {}: {}", path, what, std::strerror(errno)));
}

FileDescriptor::FileDescriptor(const std::string& path, int flags, int mode)
    : fd_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {
  if (fd_ < 0) throw_errno(path, "cannot open");
}
FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

MappedFile::MappedFile(const std::string& path) {
  const FileDescriptor file(path, O_RDONLY);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_errno(path, "cannot read");
  if (!S_ISREG(status.st_mode)) throw IoError(path + ": expected a regular file");
  size_ = size_t(status.st_size);
  if (size_ == 0) return;
  void* mapping = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (mapping == MAP_FAILED) throw_errno(path, "cannot map");
  data_ = static_cast<const std::byte*>(mapping);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

bool path_exists(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR) throw_errno(path, "cannot look at it");
  return false;
}

std::string read_file(const std::string& path) {
  const FileDescriptor file(path, O_RDONLY);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_errno(path, "cannot read");
  if (S_ISDIR(status.st_mode)) throw IoError(path + ": expected a file, found a directory");
  std::string text(size_t(status.st_size), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t got = ::read(file.get(), text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno(path, "cannot read");
    if (got == 0) break;
    done += size_t(got);
  }
  text.resize(done);
  return text;
}

void write_at(int fd, const std::string& path, const void* data, size_t bytes, uint64_t offset) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = ::pwrite(fd, at, bytes, off_t(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw_errno(path, "cannot write");
    at += put, bytes -= size_t(put), offset += uint64_t(put);
  }
}

void write_file(const std::string& path, std::string_view text) {
  const FileDescriptor file(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  write_at(file.get(), path, text.data(), text.size(), 0);
  if (::fsync(file.get()) != 0) throw_errno(path, "cannot sync");
}

void check_writable(const std::string& path) {
  const bool there = path_exists(path);
  const std::string folder = std::filesystem::path(path).parent_path().string();
  const std::string written = there ? path : folder.empty() ? "." : folder;
  if (::access(written.c_str(), W_OK) != 0) throw_errno(path, "cannot be written");
  if (there && std::filesystem::is_directory(path)) {
    throw IoError(path + ": expected a file, found a directory");
  }
}

void sync_directory(const std::string& path) {
  const FileDescriptor directory(path, O_RDONLY | O_DIRECTORY);
  if (::fsync(directory.get()) != 0) throw_errno(path, "cannot sync");
}

void make_directories(const std::string& path) {
  std::error_code code;
  std::filesystem::create_directories(path, code);
  if (code) throw IoError(path + ": cannot create the directory: " + code.message());
}

std::string content_hash(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}
std::string content_hash(std::string_view text) {
  return content_hash(std::as_bytes(std::span(text.data(), text.size())));
}

}  // namespace tandem
