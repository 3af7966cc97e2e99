#include "comm/processes/hub_bootstrap.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/env.h"
#include "tandem/error.h"

namespace tandem::processes {

HubBootstrap::HubBootstrap(const Launch& launch, double deadline_s) {
  rank_ = launch.rank;
  size_ = launch.size;
  hub_.emplace(launch, control::secret_of_environment(), deadline_s);
}

std::unique_ptr<Wire> HubBootstrap::own_wire(WireSink&, Waker&) {
  if (env().mpi_wire == "mpi") {
    throw Unsupported(
        "TANDEM_MPI_WIRE=mpi: these ranks were started without MPI: expected tcp or auto, or "
        "mpirun");
  }
  throw IoError(
      fmt::format("rank {}: the processes cannot all reach each other over TCP: expected a network "
                  "between them",
                  rank_));
}

void HubBootstrap::failed(const std::exception& error) {
  const bool known = dynamic_cast<const Mismatch*>(&error) || dynamic_cast<const Aborted*>(&error);
  if (dynamic_cast<const Timeout*>(&error)) {
    hub_->end_with(error.what());
  } else if (!known) {
    hub_->abort(error.what());
  }
  hub_.reset();
}

void HubBootstrap::gather_bytes(std::span<const std::byte> mine, std::span<std::byte> all,
                                std::string_view what) {
  const auto blobs = hub_->exchange(mine, what);
  for (size_t rank = 0; rank < blobs.size(); ++rank) {
    if (blobs[rank].size() != mine.size()) {
      throw Mismatch(
          fmt::format("{}: rank {} says {} bytes, rank {} {}: expected the same version "
                      "of Tandem on all ranks",
                      what, rank_, mine.size(), rank, blobs[rank].size()));
    }
    std::copy(blobs[rank].begin(), blobs[rank].end(), all.begin() + int64_t(rank * mine.size()));
  }
}

}  // namespace tandem::processes
