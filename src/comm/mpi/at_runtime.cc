// Lookup of libmpi on first use of MPI. Open MPI 4 and 5 share one interface.
#include "comm/mpi/api.h"

#ifdef TANDEM_MPI_AT_RUNTIME

#include <dlfcn.h>
#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem::mpi {
namespace {

// RTLD_GLOBAL, since Open MPI's plug-ins expect to see its symbols.
void* library() {
  static void* const opened = dlopen("libmpi.so.40", RTLD_NOW | RTLD_GLOBAL);
  if (opened) return opened;
  throw Unsupported(
      "mpi transport: libmpi.so.40 cannot be loaded: expected Open MPI 4 or 5 to be installed");
}

}  // namespace

void* symbol(const char* name) {
  if (void* const found = dlsym(library(), name)) return found;
  throw Unsupported(fmt::format("mpi transport: libmpi.so.40 has no {}: expected Open MPI", name));
}

}  // namespace tandem::mpi

#endif
