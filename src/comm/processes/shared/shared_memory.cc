#include "comm/processes/shared/shared_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "core/system/machine.h"
#include "core/system/process/file_limit.h"
#include "tandem/error.h"

namespace tandem::processes {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw IoError(fmt::format("{}: {}", what, describe_errno(errno)));
}

uint64_t inode_of(const char* path) {
  struct stat status {};
  return stat(path, &status) == 0 ? status.st_ino : 0;
}

}  // namespace

SharedMemory::SharedMemory(int fd, size_t bytes, uint64_t offset) : bytes_(bytes), fd_(fd) {
  if (bytes == 0) return;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, off_t(offset));
  if (at == MAP_FAILED) {
    close(fd);
    fail(fmt::format("shared memory of {} bytes: cannot be mapped", bytes));
  }
  data_ = static_cast<std::byte*>(at);
}

std::shared_ptr<SharedMemory> SharedMemory::create(size_t bytes) {
  const int fd = memfd_create("tandem", MFD_CLOEXEC);
  if (fd < 0) fail("shared memory: memfd_create");
  if (ftruncate(fd, off_t(bytes)) != 0) {
    close(fd);
    fail(fmt::format("shared memory of {} bytes: cannot be made", bytes));
  }
  return std::shared_ptr<SharedMemory>(new SharedMemory(fd, bytes));
}

std::shared_ptr<SharedMemory> SharedMemory::open(Handle handle, size_t bytes) {
  const std::string path = fmt::format("/proc/{}/fd/{}", handle.pid, handle.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) fail(fmt::format("shared memory of process {}: cannot be opened", handle.pid));
  std::shared_ptr<SharedMemory> memory(new SharedMemory(fd, bytes));
  memory->seal();
  return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::map(int fd, uint64_t offset, size_t bytes) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) fail(fmt::format("shared memory: file descriptor {}", fd));
  std::shared_ptr<SharedMemory> memory(new SharedMemory(copy, bytes, offset));
  memory->seal();
  return memory;
}

SharedMemory::~SharedMemory() {
  if (data_) munmap(data_, bytes_);
  seal();
}

SharedMemory::Handle SharedMemory::handle() const {
  return {getpid(), fd_};
}

void SharedMemory::seal() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

uint64_t host_identity() {
  const std::string text =
      fmt::format("{}/{}/{}/{}", boot_id(), host_name(), inode_of("/proc/self/ns/net"),
                  inode_of("/proc/self/ns/pid"));
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : text) hash = (hash ^ uint8_t(c)) * 1099511628211u;
  return hash;
}

}  // namespace tandem::processes
