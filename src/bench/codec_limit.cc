#include "bench/codec_limit.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>

#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int64_t kChunkElements = 1 << 16;
constexpr size_t kChunkBytes = size_t(256) << 10;  // slot size of the collectives
                                                   // (comm/workspace.cc)

template <typename Body>
void for_chunks(int64_t elements, Body body) {
  for (int64_t at = 0; at < elements; at += kChunkElements) {
    body(at, std::min(kChunkElements, elements - at));
  }
}

Tensor chunk_of(const Tensor& all, int64_t at, int64_t count) {
  return Tensor(all.as<std::byte>() + size_t(at) * size_of(all.dtype()), all.dtype(), {count});
}

}  // namespace

CodecWork::CodecWork(const Wire& wire, const CodecSizes& sizes, const Tensor& from,
                     const Tensor& to)
    : wire_(wire),
      sizes_(sizes),
      from_(from),
      to_(to),
      message_(wire.bytes(kChunkElements, from.dtype())) {
  for (const int64_t size : sizes.decoded) {
    for_chunks(size, [&](int64_t at, int64_t count) {
      std::vector<std::byte>& message = messages_[count];
      if (!message.empty()) return;
      message.resize(wire_.bytes(count, from_.dtype()));
      message.resize(encode(wire_, chunk_of(from_, at, count), message));
    });
  }
}

void CodecWork::encode_values(int64_t elements) {
  for_chunks(elements, [&](int64_t at, int64_t count) {
    encode(wire_, chunk_of(from_, at, count), message_);
  });
}

void CodecWork::decode_values(int64_t elements) {
  for_chunks(elements, [&](int64_t at, int64_t count) {
    decode(wire_, messages_.at(count), chunk_of(to_, at, count));
  });
}

void CodecWork::run() {
  for (const int64_t size : sizes_.encoded) encode_values(size);
  for (const int64_t size : sizes_.decoded) decode_values(size);
}

/// TCP connection of this process to itself.
class TransportWork::Loopback {
 public:
  Loopback() {
    const int listener = checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
    sockaddr_in here{};
    here.sin_family = AF_INET;
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof here;
    checked(::bind(listener, reinterpret_cast<sockaddr*>(&here), size), "bind");
    checked(::listen(listener, 1), "listen");
    checked(::getsockname(listener, reinterpret_cast<sockaddr*>(&here), &size), "getsockname");
    out_ = checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
    checked(::connect(out_, reinterpret_cast<sockaddr*>(&here), size), "connect");
    in_ = checked(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK), "accept");
    close(listener);
    require_one_process();
    checked(::pipe2(pipe_, O_CLOEXEC | O_NONBLOCK), "pipe");
    fcntl(pipe_[1], F_SETPIPE_SZ, 1 << 20);  // a smaller pipe is only slower
    fcntl(out_, F_SETFL, O_NONBLOCK);
  }
  ~Loopback() {
    for (const int each : {out_, in_, pipe_[0], pipe_[1]}) {
      if (each >= 0) close(each);
    }
  }
  Loopback(const Loopback&) = delete;
  Loopback& operator=(const Loopback&) = delete;

  void move(std::span<const std::byte> source, std::byte* target) {
    size_t spliced = 0, in_pipe = 0, received = 0;
    while (received < source.size()) {
      if (spliced < source.size()) {
        const iovec size{const_cast<std::byte*>(source.data()) + spliced, source.size() - spliced};
        const size_t bytes = moved(::vmsplice(pipe_[1], &size, 1, SPLICE_F_NONBLOCK), "vmsplice");
        spliced += bytes, in_pipe += bytes;
      }
      if (in_pipe > 0) {
        in_pipe -=
            moved(::splice(pipe_[0], nullptr, out_, nullptr, in_pipe, SPLICE_F_NONBLOCK), "splice");
      }
      received += moved(::recv(in_, target + received, source.size() - received, 0), "recv");
    }
  }

 private:
  static int checked(int result, const char* what) {
    if (result >= 0) return result;
    throw IoError(fmt::format("bench: loopback: {}: {}", what, std::strerror(errno)));
  }
  static size_t moved(ssize_t result, const char* what) {
    if (result >= 0) return size_t(result);
    if (errno == EAGAIN || errno == EINTR) return 0;
    throw IoError(fmt::format("bench: loopback: {}: {}", what, std::strerror(errno)));
  }
  /// Another process of this host may have connected first.
  void require_one_process() const {
    sockaddr_in ours{}, remote{};
    socklen_t size = sizeof ours;
    checked(::getsockname(out_, reinterpret_cast<sockaddr*>(&ours), &size), "getsockname");
    checked(::getpeername(in_, reinterpret_cast<sockaddr*>(&remote), &size), "getpeername");
    if (ours.sin_port == remote.sin_port) return;
    throw IoError("bench: loopback: another process connected: expected none");
  }

  int out_ = -1, in_ = -1, pipe_[2] = {-1, -1};
};

TransportWork::TransportWork(const Communicator& comm, int64_t bytes)
    : bytes_(bytes), source_(kChunkBytes), target_(kChunkBytes) {
  const bool processes = comm.transport() == "mpi" || comm.transport() == "processes";
  if (processes && comm.link() != "shm") loopback_ = std::make_unique<Loopback>();
}

TransportWork::~TransportWork() = default;

void TransportWork::run() {
  for (int64_t at = 0; at < bytes_; at += int64_t(kChunkBytes)) {
    const auto size = std::min(kChunkBytes, size_t(bytes_ - at));
    if (loopback_) {
      loopback_->move({source_.data(), size}, target_.data());
    } else {
      std::memcpy(target_.data(), source_.data(), size);
    }
  }
}

}  // namespace tandem
