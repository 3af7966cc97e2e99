#include "cli/commands.h"

namespace tandem::cli {

void add_data(CLI::App& app) {
  auto* command = app.add_subcommand("data", "Work with the data of runs");
  command->require_subcommand(1);
  add_data_check(*command);
  add_data_index(*command);
}

}  // namespace tandem::cli
