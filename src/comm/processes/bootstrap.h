// Bootstrap: how the processes of a world find each other. It serves an Engine while that starts;
// what its ranks say to each other afterwards goes through memory that they share and through a
// Wire. Two kinds: MPI (comm/mpi/mpi_bootstrap.h), and the control plane's hub where there is none
// (hub_bootstrap.h). One thread at a time calls it.
#pragma once

#include <exception>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "comm/processes/wire.h"

namespace tandem::processes {

class Waker;

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  int rank() const { return rank_; }
  int size() const { return size_; }
  /// What the transport of its ranks is called.
  virtual std::string_view transport() const = 0;

  /// Collective: every rank's value, by rank. `what`: the step that is named in errors.
  template <typename T>
  std::vector<T> gather(const T& mine, std::string_view what) {
    std::vector<T> all(static_cast<size_t>(size_));
    gather_bytes(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), what);
    return all;
  }
  /// Collective: whether it is so on every rank.
  bool everywhere(bool here, std::string_view what);

  /// Whether messages of its own reach another host by something better than TCP.
  virtual bool has_fabric() const = 0;
  /// For where sockets are not to be used, or lead nowhere. Throws IoError where it has no messages
  /// of its own.
  virtual std::unique_ptr<Wire> own_wire(WireSink& sink, Waker& waker) = 0;
  /// Ranks are connected: nothing more will be gathered.
  virtual void connected() {}
  /// The start has failed with `error`. Mismatch is known to all ranks.
  virtual void failed(const std::exception& error) = 0;
  /// All ranks have left.
  virtual void end() {}
  /// Where a rank that ends before the others ends them, too.
  virtual bool must_end_together() const { return false; }

 protected:
  /// `mine` is as long on every rank, and `all` as those of all.
  virtual void gather_bytes(std::span<const std::byte> mine, std::span<std::byte> all,
                            std::string_view what) = 0;

  int rank_ = 0, size_ = 1;
};

}  // namespace tandem::processes
