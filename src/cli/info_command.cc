#include <fmt/format.h>

#include <thread>

#include "cli/commands.h"
#include "core/version.h"
#include "tandem/communicator.h"

namespace tandem::cli {

void add_info(CLI::App& app) {
  auto* command = app.add_subcommand("info", "What this build and this machine offer");
  command->callback([] {
    fmt::print("tandem {} ({}), {} CPU threads, mpi launcher: {}\n", kVersion, kCommit,
               std::thread::hardware_concurrency(), launched_by_mpi() ? "yes" : "no");
  });
}

}  // namespace tandem::cli
