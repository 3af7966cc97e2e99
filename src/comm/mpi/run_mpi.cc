#include <cstdlib>

#include "comm/mpi/mpi_bootstrap.h"
#include "comm/processes/rank.h"
#include "comm/rendezvous/launch.h"

namespace tandem {

bool launched_by_mpi() {
  return launched_by_some_mpi() || std::getenv("PMIX_RANK");
}

void run_mpi(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  processes::run(mpi::engine(), options, body);
}

Communicators new_mpi_rank(const WorldOptions& options) {
  return processes::new_rank(mpi::engine(), options);
}

}  // namespace tandem
