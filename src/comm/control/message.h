// Messages of the control plane over TCP: a fixed header, then `bytes` of payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem::control {

enum class Kind : uint32_t {
  hello,    ///< rank -> hub: who this is; value = world size
  blob,     ///< rank -> hub: its part of an exchange (payload: name, then blob)
  all,      ///< hub -> rank: everyone's parts, one message each; rank = whose
  overdue,  ///< rank -> hub: its deadline passed
  missing,  ///< hub -> rank: rank = the first that has not come, value = the exchange
  abort,    ///< both ways: rank = who failed, payload = why
  bye,      ///< rank -> hub: it needs nothing more; hub -> rank: it ends, nothing having failed
};

struct Header {
  Kind kind;
  int32_t rank;
  uint64_t value;  ///< the exchange's number, but for hello
  uint32_t name_bytes, blob_bytes;
};

struct Message {
  Header header{};
  std::vector<std::byte> payload;
};

/// A connected socket, closed with this. Sending and receiving never raise SIGPIPE.
class Connection {
 public:
  Connection() = default;
  explicit Connection(int fd) : fd_(fd) {}
  ~Connection() { close(); }
  Connection(Connection&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Connection& operator=(Connection&& other) noexcept;
  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void close();

  /// False when the other end is gone.
  bool send(const Header& header, const void* name, const void* blob) const;
  /// Waits up to `seconds` for something to receive, be it the end.
  bool readable(double seconds) const;
  enum class Received { message, timeout, gone };
  /// Waits up to `seconds` for the first byte.
  Received receive(Message& message, double seconds) const;
  /// Of what is here already, without taking it: a message and its kind, nothing (timeout), the
  /// end.
  Received peek(Kind& kind) const;

 private:
  bool read_all(void* to, size_t bytes) const;
  bool write_all(const void* from, size_t bytes) const;
  int fd_ = -1;
};

/// A socket that listens on `port` (0: any), on the loopback alone when `host` is local, else on
/// every address. Throws Error.
Connection listen_on(const char* host, int port);
/// Connects, trying again until `seconds` are over; not open when nobody listened.
Connection connect_to(const char* host, int port, double seconds);

}  // namespace tandem::control
