// Stub of the mpi transport for a build without MPI.
#include "comm/world/native.h"
#include "comm/world/new_worlds.h"
#include "tandem/communicator.h"

namespace tandem {

bool launched_by_mpi() {
  return false;
}

namespace {

[[noreturn]] void refuse() {
  throw Unsupported("mpi transport: this build has no MPI (configure with -DTANDEM_MPI=ON)");
}

}  // namespace

void run_mpi(const WorldOptions&, const std::function<void(Communicator&)>&) {
  refuse();
}

Communicators new_mpi_rank(const WorldOptions&) {
  refuse();
}

Communicators adopt_mpi_rank(int, const WorldOptions&) {
  refuse();
}

std::string native_name(const Communicator&, const NativeCall&) {
  return "";
}

double run_native(Communicator&, const NativeCall&) {
  refuse();
}

}  // namespace tandem
