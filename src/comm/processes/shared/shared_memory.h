// Memory that the processes of one host can map, without a name in any file system: nothing remains
// when a process is killed.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

namespace tandem::processes {

class SharedMemory {
 public:
  /// Address by which another process of this host opens the memory while the owner keeps it open.
  struct Handle {
    pid_t pid = 0;
    int fd = -1;
  };

  /// Allocates zero-filled memory. Throws IoError.
  static std::shared_ptr<SharedMemory> create(size_t bytes);
  /// Maps another process's memory. Throws IoError.
  static std::shared_ptr<SharedMemory> open(Handle handle, size_t bytes);
  /// Maps a range of an open file without a name, which outlives this object. Throws IoError.
  static std::shared_ptr<SharedMemory> map(int fd, uint64_t offset, size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Handle handle() const;
  /// Prevents further opens; mappings remain valid.
  void seal();

 private:
  SharedMemory(int fd, size_t bytes, uint64_t offset = 0);
  std::byte* data_ = nullptr;
  size_t bytes_;
  int fd_;
};

/// Equal on two processes exactly if they may share memory: same boot of the same machine, same
/// host name, network and process namespace. Ranks in other network namespaces count as other
/// hosts.
uint64_t host_identity();

}  // namespace tandem::processes
