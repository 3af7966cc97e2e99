#include "comm/processes/rendezvous_bootstrap.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/env.h"
#include "tandem/error.h"

namespace tandem::processes {

RendezvousBootstrap::RendezvousBootstrap(const Launch& launch, double deadline_s) {
  rank_ = launch.rank;
  size_ = launch.size;
  server_.emplace(launch, control::secret_of_environment(), deadline_s);
}

std::unique_ptr<Transport> RendezvousBootstrap::make_transport(TransportSink&, EventFd&) {
  if (env().mpi_transport == "mpi") {
    throw Unsupported(
        "TANDEM_MPI_TRANSPORT=mpi: these ranks were started without MPI: expected tcp or auto, or "
        "mpirun");
  }
  throw IoError(
      fmt::format("rank {}: the processes cannot all reach each other over TCP: expected a network "
                  "between them",
                  rank_));
}

void RendezvousBootstrap::failed(const std::exception& error) {
  const bool known = dynamic_cast<const Mismatch*>(&error) || dynamic_cast<const Aborted*>(&error);
  if (dynamic_cast<const Timeout*>(&error)) {
    server_->end_with(error.what());
  } else if (!known) {
    server_->abort(error.what());
  }
  server_.reset();
}

void RendezvousBootstrap::gather_bytes(std::span<const std::byte> local, std::span<std::byte> all,
                                       std::string_view what) {
  const auto blobs = server_->exchange(local, what);
  for (size_t rank = 0; rank < blobs.size(); ++rank) {
    if (blobs[rank].size() != local.size()) {
      throw Mismatch(
          fmt::format("{}: rank {} says {} bytes, rank {} {}: expected the same version "
                      "of Tandem on all ranks",
                      what, rank_, local.size(), rank, blobs[rank].size()));
    }
    std::copy(blobs[rank].begin(), blobs[rank].end(), all.begin() + int64_t(rank * local.size()));
  }
}

}  // namespace tandem::processes
