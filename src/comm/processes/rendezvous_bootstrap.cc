#include "comm/processes/rendezvous_bootstrap.h"

#include <fmt/format.h>

#include <utility>

#include "comm/rendezvous/connect.h"
#include "comm/rendezvous/endpoint.h"
#include "core/system/env.h"
#include "tandem/error.h"

namespace tandem::processes {

RendezvousBootstrap::RendezvousBootstrap(control::StoreContact contact, double deadline_s)
    : contact_(std::move(contact)) {
  rank_ = contact_.launch.rank;
  size_ = contact_.launch.size;
  deadline_s_ = deadline_s;
}

control::Connection RendezvousBootstrap::connect_to_store() {
  Launch launch = contact_.launch;
  if (!launch.one_host && contact_.secret.source.empty()) {  // ports are open to strangers
    throw InvalidArgument(
        fmt::format("rank {} of {}, rank 0 at {}: no secret: ranks of several hosts expect "
                    "TANDEM_SECRET or TANDEM_SECRET_FILE, the same for all (ranks of one host need "
                    "none: MASTER_ADDR=127.0.0.1)",
                    launch.rank, launch.size, launch.host));
  }
  if (launch.has_store) launch.world = store_world(launch.world);
  const auto credentials = control::credentials_of(contact_.secret, launch.world);
  if (rank_ == 0 && !launch.has_store) {
    control::Connection& listener = contact_.listener;
    if (!listener.open()) listener = control::listen_on(control::endpoint_of(launch));
    store_.emplace(std::move(listener), credentials, size_);
  }
  return control::join(launch, credentials, deadline_s_);
}

void RendezvousBootstrap::failed(const std::exception& error) {
  if (!store_) return;
  const auto* aborted = dynamic_cast<const Aborted*>(&error);
  aborted ? store_->end_with(aborted->origin, aborted->reason)
          : store_->end_with(rank_, error.what());
}

std::unique_ptr<Transport> RendezvousBootstrap::make_transport(TransportSink&, EventFd&) {
  throw Unsupported(
      "TANDEM_MPI_TRANSPORT=mpi: these ranks were started without MPI: expected tcp or auto, or "
      "mpirun");
}

}  // namespace tandem::processes
