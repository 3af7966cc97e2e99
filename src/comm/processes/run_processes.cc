// Ranks that are processes started by torchrun or srun, not by MPI.
#include "comm/processes/rank.h"
#include "comm/processes/rendezvous_bootstrap.h"
#include "comm/rendezvous/launch.h"
#include "comm/world/new_worlds.h"
#include "core/system/env.h"

namespace tandem {
namespace {

std::unique_ptr<processes::Bootstrap> new_bootstrap(const WorldOptions& options) {
  const auto launch = launched_by_environment();
  if (!launch) {
    throw InvalidArgument(
        "processes transport: no launcher started this process as one of several: expected "
        "torchrun's or srun's variables (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT)");
  }
  return std::make_unique<processes::RendezvousBootstrap>(*launch, control::secret_of_environment(),
                                                          world_deadline(options.deadline_s));
}

std::unique_ptr<processes::Engine>& engine_of_process() {
  static std::unique_ptr<processes::Engine> engine;
  return engine;
}

/// Engine of this process, connected at the first call, within its deadline.
processes::Engine& launched_engine(const WorldOptions& options) {
  auto& engine = engine_of_process();
  if (!engine) engine = std::make_unique<processes::Engine>(new_bootstrap(options));
  return *engine;
}

}  // namespace

bool launched() {
  return launched_by_mpi() || launched_by_environment();
}

void run_processes(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  processes::run(launched_engine(options), options, body);
}

void leave_processes() {
  engine_of_process().reset();
}

Communicators new_process_rank(const WorldOptions& options) {
  return processes::new_rank(launched_engine(options), options);
}

}  // namespace tandem
