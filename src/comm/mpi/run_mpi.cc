#include <cstdlib>

#include "comm/mpi/mpi_bootstrap.h"
#include "comm/processes/rank.h"

namespace tandem {

bool launched_by_mpi() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"}) {
    if (std::getenv(name)) return true;
  }
  return false;
}

void run_mpi(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  processes::run(mpi::engine(), options, body);
}

Communicators new_mpi_rank(const WorldOptions& options) {
  return processes::new_rank(mpi::engine(), options);
}

}  // namespace tandem
