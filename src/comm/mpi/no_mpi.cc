// Stands in for the mpi transport in a build without MPI.
#include "comm/native.h"
#include "tandem/communicator.h"

namespace tandem {

bool launched_by_mpi() {
  return false;
}

void run_mpi(const WorldOptions&, const std::function<void(Communicator&)>&) {
  throw Unsupported("mpi transport: this build has no MPI (configure with -DTANDEM_MPI=ON)");
}

std::string native_name(const Communicator&, const NativeCall&) {
  return "";
}

double run_native(Communicator&, const NativeCall&) {
  throw Unsupported("mpi transport: this build has no MPI (configure with -DTANDEM_MPI=ON)");
}

}  // namespace tandem
