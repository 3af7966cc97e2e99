// This process's rank of a World: of all that mpirun started, or of an adopted communicator.
#include <fmt/format.h>

#include <exception>
#include <numeric>

#include "comm/mpi/mpi_communicator.h"
#include "comm/mpi/options.h"
#include "comm/new_worlds.h"
#include "core/env.h"
#include "observe/recorder.h"

namespace tandem {
namespace mpi {
namespace {

/// A run that lasts as long as its communicators.
struct OpenRun {
  Engine& engine;
  const uint64_t run;
  explicit OpenRun(Engine& engine_) : engine(engine_), run(engine_.begin_run()) {}
  ~OpenRun() { engine.end_run(engine.run_aborted()); }
};

Communicators new_rank(Engine& engine, const WorldOptions& options) {
  const auto open = std::make_shared<OpenRun>(engine);
  try {
    check_options(options, engine.size());
    std::vector<int> ranks(static_cast<size_t>(engine.size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    auto comm =
        std::make_unique<MpiCommunicator>(engine, open->run << 32, engine.rank(), std::move(ranks),
                                          world_deadline(options.deadline_s));
    recorder().set_rank(engine.rank());
    return {{comm.release(), [open](Communicator* gone) { delete gone; }}};
  } catch (const std::exception& error) {
    engine.abort(error.what());
    throw;
  }
}

/// The handle's communicator, once MPI is what its threads need.
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

}  // namespace
}  // namespace mpi

Communicators new_mpi_rank(const WorldOptions& options) {
  return mpi::new_rank(mpi::Engine::instance(), options);
}

Communicators adopt_mpi_rank(int handle, const WorldOptions& options) {
  const MPI_Comm comm = mpi::usable(handle);
  auto& engine = mpi::Engine::instance(comm);
  if (!engine.has_ranks_of(comm)) {
    throw InvalidArgument(fmt::format(
        "adopt_mpi: another communicator than the first, of {} ranks: expected the same "
        "ranks (split makes smaller worlds)",
        engine.size()));
  }
  return mpi::new_rank(engine, options);
}

}  // namespace tandem
