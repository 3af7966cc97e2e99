#include "comm/processes/shared/snapshot_memory_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "core/system/env.h"
#include "tandem/error.h"

namespace tandem::processes {
namespace {

constexpr off_t kSnapshotFileBytes = off_t(kSnapshotRange) * kMaxSnapshotRanks;
constexpr int kSnapshotSeals = F_SEAL_SHRINK | F_SEAL_GROW;
/// For a process that is ending to release its range.
constexpr auto kReleaseTime = std::chrono::seconds(5);

}  // namespace

int create_snapshot_memory() {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) return -1;
  const int fd = memfd_create("tandem snapshots", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return -1;
  if (ftruncate(fd, kSnapshotFileBytes) == 0 && fcntl(fd, F_ADD_SEALS, kSnapshotSeals) == 0)
    return fd;
  close(fd);
  return -1;
}

std::optional<FileDescriptor> open_snapshot_memory(int rank) {
  const int fd = env().snapshot_memory;
  if (fd < 0) return {};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSnapshotSeals) != kSnapshotSeals ||
      lseek(fd, 0, SEEK_END) != kSnapshotFileBytes) {
    throw InvalidArgument(
        fmt::format("{}={}: expected the file descriptor that tandem launch passes on ({})",
                    kSnapshotMemoryVariable, fd, seals < 0 ? strerror(errno) : "another file"));
  }
  // Opened again: locks belong to what was opened, which ranks of one launcher share otherwise.
  FileDescriptor file(fmt::format("/proc/self/fd/{}", fd), O_RDWR | O_CLOEXEC);
  struct flock range {};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = off_t(kSnapshotRange) * rank;
  range.l_len = off_t(kSnapshotRange);
  const auto end = std::chrono::steady_clock::now() + kReleaseTime;
  while (fcntl(file.get(), F_OFD_SETLK, &range) != 0) {
    if (std::chrono::steady_clock::now() > end) {
      throw IoError(fmt::format(
          "memory for snapshots of rank {}: another process of this launcher has it", rank));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return file;
}

}  // namespace tandem::processes
