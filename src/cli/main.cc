#include <fmt/format.h>

#include <exception>

#include "cli/commands.h"
#include "core/version.h"
#include "tandem/error.h"

int main(int argc, char** argv) {
  CLI::App app{"Tandem: train and run Transformers with the communication out of the way.",
               "tandem"};
  app.require_subcommand(1);
  app.set_version_flag("--version",
                       fmt::format("tandem {} ({})", tandem::kVersion, tandem::kCommit));
  tandem::cli::add_info(app);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const tandem::Error& error) {
    fmt::print(stderr, "tandem: error: {}\n", error.what());
    return error.exit_code();
  } catch (const std::exception& error) {
    fmt::print(stderr, "tandem: internal error: {}\n", error.what());
    return 70;
  }
}
