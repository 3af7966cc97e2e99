#include "comm/processes/rendezvous_bootstrap.h"

#include <fmt/format.h>

#include "comm/rendezvous/connect.h"
#include "comm/rendezvous/endpoint.h"
#include "core/env.h"
#include "tandem/error.h"

namespace tandem::processes {

RendezvousBootstrap::RendezvousBootstrap(const Launch& launch, const control::Secret& secret,
                                         double deadline_s)
    : launch_(launch), secret_(secret) {
  rank_ = launch.rank;
  size_ = launch.size;
  deadline_s_ = deadline_s;
}

control::Connection RendezvousBootstrap::connect_to_store() {
  if (!launch_.one_host && secret_.source.empty()) {  // ports are open to strangers
    throw InvalidArgument(
        fmt::format("rank {} of {}, rank 0 at {}: no secret: ranks of several hosts expect "
                    "TANDEM_SECRET or TANDEM_SECRET_FILE, the same for all (ranks of one host need "
                    "none: MASTER_ADDR=127.0.0.1)",
                    launch_.rank, launch_.size, launch_.host));
  }
  Launch launch = launch_;
  if (launch.has_store) launch.world = store_world(launch.world);
  const auto credentials = control::credentials_of(secret_, launch.world);
  if (rank_ == 0 && !launch_.has_store) {
    store_.emplace(control::listen_on(control::endpoint_of(launch_)), credentials, size_);
  }
  return control::join(launch, credentials, deadline_s_);
}

std::unique_ptr<Transport> RendezvousBootstrap::make_transport(TransportSink&, EventFd&) {
  throw Unsupported(
      "TANDEM_MPI_TRANSPORT=mpi: these ranks were started without MPI: expected tcp or auto, or "
      "mpirun");
}

}  // namespace tandem::processes
