// Transport over TCP sockets. The thread sleeps in epoll until a large part of the pending bytes
// can be sent or received, so a long transfer costs few wake-ups. Large contents are copied once,
// by the receiver, from the system to their destination: the sender passes its pages zero-copy
// (pipe.h), and its source is free once the receiver reports that it has the copy.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>

#include "comm/processes/shared/pipe.h"
#include "comm/processes/tcp/event_fd.h"
#include "comm/processes/tcp/peer_connections.h"
#include "comm/processes/transport.h"

namespace tandem::processes {

class SocketTransport final : public Transport {
 public:
  using AddressOf = std::function<PeerAddress(int rank)>;
  /// `connections`: none if all ranks share memory. `address_of`: asked when a message is first
  /// sent to a rank. Throws IoError.
  SocketTransport(std::unique_ptr<PeerConnections> connections, AddressOf address_of,
                  TransportSink& sink, EventFd& event_fd);

  const char* name() const override { return "tcp"; }
  /// Max bytes that an abort may have to wait for.
  size_t chunk_bytes() const override { return size_t(4) << 20; }
  bool polls() const override { return false; }
  void send(int peer, std::unique_ptr<Outgoing> message) override;
  bool progress() override;
  void sleep(bool awaited, std::chrono::microseconds longest) override;
  bool sending() const override;
  void notify_leave() override;
  void close() override;

 private:
  struct Peer {
    control::Connection socket;  ///< none: not connected yet, or lost
    bool lost = false;
    bool readable = false, writable = true;
    bool early = false;    ///< the next contents are for a buffer that this rank has not made yet
    bool leaving = false;  ///< the peer has announced that it leaves
    bool left = false;     ///< this rank has announced it to the peer
    std::deque<std::unique_ptr<Outgoing>> out;
    size_t sent = 0;             ///< bytes of the first message sent, header included
    std::unique_ptr<Pipe> pipe;  ///< holds the next bytes of the first message, if it is zero-copy
    std::deque<std::unique_ptr<Outgoing>> zero_copy;  ///< sent, not yet acknowledged
    Header header{};
    size_t received = 0;  ///< bytes received of the arriving message, header included
    std::shared_ptr<LocalBuffer> buffer;
    std::vector<std::byte>
        contents;  ///< contents of a message that is not a put, or of a dropped put
    int low_water = 1;
  };

  void register_fd(int fd, uint32_t events, uint64_t what);
  bool drop_cancelled(Peer& peer);
  bool write_some(int rank, Peer& peer);
  /// Returns the number of bytes that the socket accepted; 0: it would block, -1: it is broken.
  int64_t write_copied(Peer& peer);
  int64_t write_zero_copy(Peer& peer);
  void take_sent(Peer& peer, size_t bytes);
  bool read_some(int rank, Peer& peer);
  bool accepts(int rank, Peer& peer);
  bool begin_contents(Peer& peer);
  void connect_some();
  void deliver(int rank, Peer& peer);
  void take_back(Peer& peer);
  void set_low_water(Peer& peer);
  void lose(int rank, Peer& peer);

  control::Connection epoll_;
  TransportSink& sink_;
  EventFd& event_fd_;
  std::unique_ptr<PeerConnections> connections_;
  AddressOf address_of_;
  std::map<int, Peer> peers_;  ///< those with a message or a connection
  bool leaving_ = false;
};

}  // namespace tandem::processes
