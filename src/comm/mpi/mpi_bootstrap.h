// Bootstrap by MPI, which is initialized when the first run begins and finalized at process exit;
// if the caller initialized it, the caller finalizes it. The communication thread makes every MPI
// call.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "comm/mpi/api.h"

#include "comm/processes/bootstrap.h"
#include "comm/processes/engine.h"
#include "comm/processes/rendezvous_bootstrap.h"

namespace tandem::mpi {

class MpiBootstrap final : public processes::Bootstrap {
 public:
  /// Ranks are those of `base`, which is duplicated. `engine` leaves before the caller's
  /// MPI_Finalize does anything else.
  MpiBootstrap(processes::Engine& engine, MPI_Comm base);

  MPI_Comm comm() const { return comm_; }
  std::string_view transport() const override { return "mpi"; }
  control::Connection connect_to_store() override;
  bool has_fabric() const override;
  std::unique_ptr<processes::Transport> make_transport(processes::TransportSink& sink,
                                                       processes::EventFd& event_fd) override;
  void failed(const std::exception& error) override;
  void end() override;
  bool must_end_together() const override { return finalizes_mpi_; }

 private:
  std::vector<std::byte> gather(std::span<const std::byte> local) const;

  MPI_Comm comm_ = MPI_COMM_NULL;
  std::optional<processes::RendezvousBootstrap> rendezvous_;  ///< with an address sent by MPI
  bool finalizes_mpi_ = false;  ///< MPI was initialized by this object
};

/// Engine of this process in the MPI world: the ranks of `base` at the first call.
processes::Engine& engine(MPI_Comm base = MPI_COMM_WORLD);
/// Communicator over which the world of `engine()` makes its own MPI calls.
MPI_Comm comm_of(const processes::Engine& engine);

}  // namespace tandem::mpi
