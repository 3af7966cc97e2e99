// Bootstrap by which the processes of a world connect. It serves an Engine during startup;
// afterwards ranks communicate through shared memory and a Wire. Two kinds: MPI
// (comm/mpi/mpi_bootstrap.h), and the control plane's rendezvous server without it
// (rendezvous_bootstrap.h). One thread at a time calls it.
#pragma once

#include <exception>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "comm/processes/transport.h"

namespace tandem::processes {

class EventFd;

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Name of its ranks' transport.
  virtual std::string_view transport() const = 0;

  /// Collective: every rank's value, by rank. `what`: name of the step in errors.
  template <typename T>
  std::vector<T> gather(const T& local, std::string_view what) {
    std::vector<T> all(static_cast<size_t>(size_));
    gather_bytes(std::as_bytes(std::span(&local, 1)), std::as_writable_bytes(std::span(all)), what);
    return all;
  }
  /// Collective: whether `here` is true on every rank.
  bool everywhere(bool here, std::string_view what);

  /// Whether its own messages reach other hosts over a better network than TCP.
  virtual bool has_fabric() const = 0;
  /// Transport by its own messages, if sockets are disabled or cannot connect. Throws IoError if it
  /// has none.
  virtual std::unique_ptr<Transport> make_transport(TransportSink& sink, EventFd& event_fd) = 0;
  /// Called when ranks are connected: there are no further gathers.
  virtual void connected() {}
  /// Called when startup has failed with `error`. All ranks know of a Mismatch.
  virtual void failed(const std::exception& error) = 0;
  /// Called when all ranks have left.
  virtual void end() {}
  /// Whether a rank that ends before the others terminates them.
  virtual bool must_end_together() const { return false; }

 protected:
  /// `local` has the same size on every rank; `all` holds those of all ranks.
  virtual void gather_bytes(std::span<const std::byte> local, std::span<std::byte> all,
                            std::string_view what) = 0;

  int rank_ = 0, size_ = 1;
};

}  // namespace tandem::processes
