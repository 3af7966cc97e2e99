#include <fmt/format.h>

#include <cstdlib>
#include <numeric>

#include "comm/mpi/mpi_communicator.h"
#include "comm/mpi/options.h"
#include "core/env.h"
#include "observe/recorder.h"

namespace tandem {

void mpi::check_options(const WorldOptions& options, int world) {
  if (options.ranks != 1 && options.ranks != world) {
    throw InvalidArgument(fmt::format("ranks {}: the MPI world has {}: expected {} or none given",
                                      options.ranks, world, world));
  }
  if (options.link) {
    throw InvalidArgument(fmt::format("link '{}': expected none: only thread-ranks emulate a link",
                                      options.link->describe()));
  }
}

bool launched_by_mpi() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"}) {
    if (std::getenv(name)) return true;
  }
  return false;
}

void run_mpi(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  auto& engine = mpi::Engine::instance();
  const uint64_t run = engine.begin_run();
  recorder().set_rank(engine.rank());
  const auto give_up = [&](const std::string& reason) {
    engine.abort(reason);
    engine.end_run(true);
  };
  try {
    mpi::check_options(options, engine.size());
    std::vector<int> ranks(static_cast<size_t>(engine.size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    mpi::MpiCommunicator comm(engine, run << 32, engine.rank(), std::move(ranks),
                              world_deadline(options.deadline_s));
    body(comm);
  } catch (const std::exception& error) {
    give_up(error.what());
    throw;
  } catch (...) {
    give_up("unknown exception");
    throw;
  }
  engine.end_run(false);
}

}  // namespace tandem
