#include "comm/processes/shared/pipe.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "core/system/process/file_limit.h"
#include "tandem/error.h"

namespace tandem::processes {
namespace {

constexpr int kCapacity = 1 << 20;  // limit for an unprivileged process

}  // namespace

Pipe::Pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
    throw IoError(std::string("pipe: ") + describe_errno(errno));
  }
  out_ = control::Connection(ends[0]);
  in_ = control::Connection(ends[1]);
  fcntl(in_.fd(), F_SETPIPE_SZ, kCapacity);  // a smaller pipe is only slower
}

size_t Pipe::lend(const std::byte* data, size_t bytes) {
  const iovec vector{const_cast<std::byte*>(data), bytes};
  while (true) {
    const ssize_t spliced = vmsplice(in_.fd(), &vector, 1, SPLICE_F_NONBLOCK);
    if (spliced < 0 && errno == EINTR) continue;
    bytes_ += spliced > 0 ? size_t(spliced) : 0;
    return spliced > 0 ? size_t(spliced) : 0;
  }
}

int64_t Pipe::drain(int socket, bool more) {
  const unsigned flags = SPLICE_F_NONBLOCK | (more ? unsigned(SPLICE_F_MORE) : 0u);
  while (true) {
    const ssize_t moved = splice(out_.fd(), nullptr, socket, nullptr, bytes_, flags);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno == EAGAIN ? 0 : -1;
    bytes_ -= size_t(moved);
    return moved;
  }
}

}  // namespace tandem::processes
