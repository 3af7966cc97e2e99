// Transport over MPI messages. MPI has nothing to block on, so it is polled.
#pragma once

#include "comm/mpi/api.h"

#include <deque>
#include <span>

#include "comm/processes/tcp/event_fd.h"
#include "comm/processes/transport.h"

namespace tandem::mpi {

using processes::EventFd;
using processes::Header;
using processes::LocalBuffer;
using processes::Outgoing;
using processes::TransportSink;

class MpiTransport final : public processes::Transport {
 public:
  MpiTransport(MPI_Comm comm, TransportSink& sink, EventFd& event_fd);

  const char* name() const override { return "mpi"; }
  size_t chunk_bytes() const override { return processes::kChunkBytes; }
  bool polls() const override { return true; }
  void send(int peer, std::unique_ptr<Outgoing> message) override;
  bool progress() override;
  void sleep(bool awaited, std::chrono::microseconds longest) override;
  bool sending() const override;
  void close() override;

 private:
  struct Started {
    std::unique_ptr<Outgoing> out;
    std::vector<std::byte> message;
    MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
  };
  struct Incoming {
    Header header;
    std::shared_ptr<LocalBuffer> buffer;
    std::vector<std::byte> contents;
    MPI_Request request = MPI_REQUEST_NULL;
    bool posted = false;
  };
  struct Peer {
    std::deque<std::unique_ptr<Outgoing>> waiting;
    std::deque<Started> started;
    std::deque<Incoming> incoming;
    int large_started = 0;
    bool damaged = false;  ///< a header was: which payload follows is unknown
  };

  void post_header(size_t slot);
  bool start_sends(int rank, Peer& peer);
  void start(int rank, Peer& peer, std::unique_ptr<Outgoing> out);
  bool finish_sends(Peer& peer);
  bool take_headers();
  void accept(int source, std::span<const std::byte> message);
  bool advance(int source, Peer& peer);
  bool post_payload(int source, const Peer& peer, size_t index, Incoming& entry);
  void deliver(Incoming& entry);

  MPI_Comm comm_;
  TransportSink& sink_;
  EventFd& event_fd_;
  std::vector<Peer> peers_;
  std::vector<std::vector<std::byte>> slots_;
  std::vector<MPI_Request> slot_requests_;
  size_t next_slot_ = 0;
  int quiet_rounds_ = 0;
};

}  // namespace tandem::mpi
