// This process's rank of a World made of the caller's MPI communicator.
#include <fmt/format.h>

#include "comm/mpi/mpi_bootstrap.h"
#include "comm/processes/rank.h"

namespace tandem {
namespace {

/// Communicator of the handle. Throws InvalidArgument unless MPI is initialized with
/// MPI_THREAD_MULTIPLE and it is an intra-communicator.
MPI_Comm usable(int handle) {
  int ready = 0, done = 0, level = 0, between_groups = 0;
  MPI_Initialized(&ready);
  MPI_Finalized(&done);
  if (!ready || done) {
    throw InvalidArgument(fmt::format("adopt_mpi: MPI is {}: expected it initialised",
                                      done ? "finalised" : "not initialised"));
  }
  MPI_Query_thread(&level);
  if (level != MPI_THREAD_MULTIPLE) {
    throw InvalidArgument(
        "adopt_mpi: MPI was initialised without MPI_THREAD_MULTIPLE: expected it, since transfers "
        "have a thread of their own");
  }
  const auto comm = handle < 0 ? MPI_COMM_NULL : MPI_Comm_f2c(MPI_Fint(handle));
  if (comm == MPI_Comm{} || comm == MPI_COMM_NULL) {
    throw InvalidArgument(
        fmt::format("adopt_mpi: handle {}: expected what MPI_Comm_c2f gives", handle));
  }
  MPI_Comm_test_inter(comm, &between_groups);
  if (between_groups) {
    throw InvalidArgument("adopt_mpi: an inter-communicator: expected an intra-communicator");
  }
  return comm;
}

/// Whether both have the same ranks in the same order.
bool same_ranks(MPI_Comm one, MPI_Comm other) {
  int result = MPI_UNEQUAL;
  MPI_Comm_compare(one, other, &result);
  return result == MPI_IDENT || result == MPI_CONGRUENT;
}

}  // namespace

Communicators adopt_mpi_rank(int handle, const WorldOptions& options) {
  const MPI_Comm comm = usable(handle);
  auto& engine = mpi::engine(comm);
  if (!same_ranks(comm, mpi::comm_of(engine))) {
    throw InvalidArgument(fmt::format(
        "adopt_mpi: another communicator than the first, of {} ranks: expected the same "
        "ranks (split makes smaller worlds)",
        engine.size()));
  }
  return processes::new_rank(engine, options);
}

}  // namespace tandem
