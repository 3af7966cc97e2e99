// Bootstrap of processes that a launcher without MPI started, or that a contact connects
// (comm/rendezvous/contact.h): the rendezvous store runs in rank 0's process, or in the launcher's.
#pragma once

#include <optional>

#include "comm/processes/bootstrap.h"
#include "comm/rendezvous/contact.h"
#include "comm/rendezvous/store_server.h"

namespace tandem::processes {

class RendezvousBootstrap final : public Bootstrap {
 public:
  RendezvousBootstrap(const Launch& launch, const control::Secret& secret, double deadline_s)
      : RendezvousBootstrap({launch, secret, {}}, deadline_s) {}
  /// Rank 0 listens already, unless `contact` has no listener.
  RendezvousBootstrap(control::StoreContact contact, double deadline_s);

  std::string_view transport() const override { return "processes"; }
  /// Throws InvalidArgument if ranks of several hosts have no secret, and what control::join
  /// throws: among others, Timeout naming rank 0 if nothing listens within the deadline.
  control::Connection connect_to_store() override;
  bool has_fabric() const override { return false; }
  std::unique_ptr<Transport> make_transport(TransportSink& sink, EventFd& event_fd) override;
  /// On rank 0, whose store tells `error` to the ranks that come too late to learn it otherwise.
  void failed(const std::exception& error) override;

 private:
  control::StoreContact contact_;
  std::optional<control::StoreServer> store_;
};

}  // namespace tandem::processes
