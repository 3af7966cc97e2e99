// Bootstrap of processes that torchrun or srun started: the rendezvous server in rank 0's process
// connects them (comm/rendezvous/control_communicator.h) and is destroyed after that. The only
// messages are those of sockets.
#pragma once

#include <optional>

#include "comm/processes/bootstrap.h"
#include "comm/rendezvous/control_communicator.h"

namespace tandem::processes {

class RendezvousBootstrap final : public Bootstrap {
 public:
  /// Collective. Throws as ControlCommunicator.
  RendezvousBootstrap(const Launch& launch, double deadline_s);

  std::string_view transport() const override { return "processes"; }
  bool has_fabric() const override { return false; }
  /// Throws IoError, or Unsupported for TANDEM_MPI_TRANSPORT=mpi.
  std::unique_ptr<Transport> make_transport(TransportSink& sink, EventFd& event_fd) override;
  void connected() override { server_.reset(); }
  void failed(const std::exception& error) override;

 private:
  void gather_bytes(std::span<const std::byte> local, std::span<std::byte> all,
                    std::string_view what) override;

  std::optional<control::ControlCommunicator> server_;
};

}  // namespace tandem::processes
