// Bootstrap by which the processes of a world find their rendezvous store. It serves an Engine
// during startup; afterwards ranks communicate through the store, shared memory and a Transport.
// Two kinds: MPI (comm/mpi/mpi_bootstrap.h), and a launcher's environment variables
// (rendezvous_bootstrap.h). One thread at a time calls it.
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <string_view>

#include "comm/processes/transport.h"
#include "comm/rendezvous/connection.h"

namespace tandem::processes {

class EventFd;

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Max seconds of a step of the startup.
  double deadline_s() const { return deadline_s_; }
  /// Seconds after which a rank that does not renew its membership counts as lost: a host that is
  /// cut off.
  virtual double lease_s() const { return std::clamp(2 * deadline_s_, 120.0, 1e9); }
  /// Name of its ranks' transport.
  virtual std::string_view transport() const = 0;

  /// Collective: a connection to the world's store, which rank 0's process may run until its
  /// bootstrap is destroyed.
  virtual control::Connection connect_to_store() = 0;
  /// Whether its own messages reach other hosts over a better network than TCP.
  virtual bool has_fabric() const = 0;
  /// Transport by its own messages. Throws Unsupported if it has none.
  virtual std::unique_ptr<Transport> make_transport(TransportSink& sink, EventFd& event_fd) = 0;
  /// Called when startup has failed with `error`. All ranks know of a Mismatch.
  virtual void failed(const std::exception&) {}
  /// Called when all ranks have left.
  virtual void end() {}
  /// Whether a rank that ends before the others terminates them.
  virtual bool must_end_together() const { return false; }

 protected:
  int rank_ = 0, size_ = 1;
  double deadline_s_ = 60;
};

}  // namespace tandem::processes
