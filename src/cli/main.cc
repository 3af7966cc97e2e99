#include <fmt/format.h>

#include <cstdlib>
#include <exception>
#include <new>
#include <string>

#include "cli/commands.h"
#include "cli/usage.h"
#include "core/env.h"
#include "core/log.h"
#include "core/version.h"
#include "tandem/error.h"

namespace {

constexpr const char* kFooter = R"(
Start here:
  tandem info                                                          what this build and machine offer
  tandem train configs/tiny.toml --tp 2 --out out/first                two ranks of this process
  mpirun -n 2 tandem train configs/tiny.toml --tp 2 --out out/second   the same on two processes
  tandem generate out/first --prompt '#include <'                      sample from what was trained

Exit codes: 0 done, 1 a benchmark's result was wrong, 2 wrong arguments or configuration, 3 a file
cannot be read, written or trusted, 4 not in this build or not possible here, 5 a wait passed its
deadline, 6 another rank aborted, 7 a CUDA or NCCL call failed, 70 internal error, 130 `train` was
stopped by SIGINT (Ctrl-C) or SIGTERM and saved a checkpoint. A command prints one line to standard
error when it fails.)";

// Under mpirun every rank reports; the prefix says which.
std::string program() {
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  return rank ? fmt::format("tandem: rank {}", rank) : "tandem";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Tandem: train and run Transformers with the communication out of the way.",
               "tandem"};
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "Print the help of every command");
  app.set_version_flag("--version",
                       fmt::format("tandem {} ({})", tandem::kVersion, tandem::kCommit));
  app.footer(kFooter);
  tandem::cli::add_train(app);
  tandem::cli::add_eval(app);
  tandem::cli::add_report(app);
  tandem::cli::add_trace(app);
  tandem::cli::add_generate(app);
  tandem::cli::add_bench(app);
  tandem::cli::add_info(app);
  try {
    tandem::check_log_level();
    if (tandem::cli::speaks()) {
      for (const std::string& line : tandem::unknown_variables()) {
        fmt::print(stderr, "tandem: warning: {}\n", line);
      }
    }
    tandem::cli::check_command(app, argc, argv);
    app.parse(argc, argv);
    return 0;
  } catch (const tandem::cli::Ended& end) {
    return end.exit_code;
  } catch (const CLI::Success& request) {  // --help, --version
    return app.exit(request);
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "{}: error: {}\n", program(), tandem::cli::explain(app, error));
    return 2;
  } catch (const tandem::Error& error) {
    fmt::print(stderr, "{}: error: {}\n", program(), error.what());
    return error.exit_code();
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "{}: error: not enough memory for the sizes asked for\n", program());
    return 4;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}: internal error: {}\n", program(), error.what());
    return 70;
  }
}
