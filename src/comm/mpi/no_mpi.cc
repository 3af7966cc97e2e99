// Stands in for the mpi transport in a build without MPI.
#include "tandem/communicator.h"

namespace tandem {

bool launched_by_mpi() {
  return false;
}

void run_mpi(const WorldOptions&, const std::function<void(Communicator&)>&) {
  throw Unsupported("mpi transport: this build has no MPI (configure with -DTANDEM_MPI=ON)");
}

}  // namespace tandem
