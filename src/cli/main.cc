#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "cli/commands.h"
#include "cli/help.h"
#include "cli/option_checks.h"
#include "cli/usage.h"
#include "core/system/console.h"
#include "core/system/env.h"
#include "core/system/log.h"
#include "core/system/terminal.h"
#include "core/version.h"
#include "tandem/error.h"

namespace {

constexpr const char* kFooter = R"(
Start here:
  tandem info                                                          this build, this machine
  tandem help train                                                    help of a command
  tandem train configs/tiny.toml --tp 2 --out out/first                two ranks of this process
  mpirun -n 2 tandem train configs/tiny.toml --tp 2 --out out/second   the same on two processes
  tandem generate out/first --prompt '#include <'                      from what was trained

Exit codes: 0 done, 1 a benchmark's result was wrong, a layout differs, a ledger has a fault or data
files differ from their manifest, 2 wrong arguments or configuration, 3 a file or folder is not
there, or cannot be read, written or trusted, 4 not in this build or not possible here, 5 a wait
passed its deadline, 6 another rank aborted, 7 a CUDA or NCCL call failed, 70 internal error, 130
`train` was stopped by SIGINT (Ctrl-C), SIGTERM, SIGHUP or train.max_seconds and saved a checkpoint.
A command prints one line to standard error when it fails.)";

// Under a launcher every rank reports errors, with its rank as a prefix.
std::string program() {
  const std::string rank = tandem::rank_of_launcher();
  return rank.empty() ? "tandem" : "tandem: rank " + rank;
}

constexpr int kRed = 31, kYellow = 33;  // of ANSI terminals

/// `text` for standard error, bold and in that colour where colours are wanted.
std::string colored(std::string_view text, int color) {
  if (!tandem::has_colors(stderr)) return std::string(text);
  return fmt::format("\x1b[1;{}m{}\x1b[0m", color, text);
}

/// Returns the exit code of the command.
int run(CLI::App& app, int num_words, char** given) {
  using namespace tandem::cli;
  const std::vector<const char*> words = expand_words(num_words, given);
  const int argc = int(words.size());
  const char* const* const argv = words.data();
  int code = 0;
  tandem::check_log_level();
  if (tandem::speaks()) {
    for (const std::string& line : tandem::unknown_variables()) {
      tandem::complain(fmt::format("tandem: {}: {}", colored("warning", kYellow), line));
    }
  }
  check_command(app, argc, argv);
  try {
    if (!print_key_help(argc, argv)) app.parse(reversed_arguments(argc, argv));
  } catch (const CLI::Success& request) {  // --help, --version
    std::ostringstream text;
    text.exceptions(std::ios_base::badbit);
    code = app.exit(request, text, text);
    if (std::fputs(text.str().c_str(), stdout) < 0) tandem::throw_output_failed(errno);
  }
  tandem::finish_output();
  return code;
}

int fail(int code, const std::string& what, const char* kind = "error") {
  tandem::complain(
      fmt::format("{}: {}: {}", program(), colored(kind, kRed), tandem::cli::one_line(what)));
  return code;
}

/// Current activity, for errors without context.
std::string while_doing() {
  const std::string& what = tandem::doing();
  return what.empty() ? "" : " (" + what + ")";
}

int out_of_memory(std::string_view what) {
  // Only OutOfMemory contains a size.
  const bool sized = what.ends_with(" bytes");
  return fail(4, fmt::format("not enough memory{}{}{}", sized ? ": no room for " : "",
                             sized ? what : "", while_doing()));
}

/// Failure of a write to standard output, or of a system resource, mostly threads.
int system_failed(const std::system_error& error) {
  if (!std::ferror(stdout)) return fail(4, error.what() + while_doing());
  try {
    tandem::throw_output_failed(error.code().value());
  } catch (const tandem::Ended& end) {
    return end.exit_code;
  } catch (const tandem::Error& named) {
    return fail(named.exit_code(), named.what());
  }
}

/// Opens closed standard streams, so that no file opened later takes their number and receives
/// printed output.
void open_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) < 0) ::open("/dev/null", O_RDWR);  // gets the lowest free number
  }
}

thread_local bool found_no_memory = false;

/// Handler of `new` without memory.
[[noreturn]] void note_no_memory() {
  found_no_memory = true;
  throw std::bad_alloc();
}

[[noreturn]] void end_without_memory() {
  constexpr std::string_view kText = "tandem: error: not enough memory\n";
  static_cast<void>(!::write(STDERR_FILENO, kText.data(), kText.size()));
  std::_Exit(4);
}

/// Ends the program after an exception that could not be thrown on. Destructors of the JSON library
/// allocate: while out of memory is thrown, they cannot. An exception that meets a function of the
/// standard library that throws none, as folder iterators with error codes, is not the current one.
[[noreturn]] void end_after_uncaught() {
  try {
    if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
    if (found_no_memory && std::uncaught_exceptions() > 0) end_without_memory();
  } catch (const std::bad_alloc&) {
    end_without_memory();
  } catch (...) {
  }
  std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  std::set_terminate(end_after_uncaught);
  std::set_new_handler(note_no_memory);
  // Writes past the file size limit then fail with an error instead of a signal.
  std::signal(SIGXFSZ, SIG_IGN);
  CLI::App app{"Tandem: train and run Transformers with the communication out of the way.",
               "tandem"};
  app.formatter(tandem::cli::help_formatter());
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "Print the help of every command");
  app.set_version_flag("--version",
                       fmt::format("tandem {} ({})", tandem::kVersion, tandem::kCommit));
  app.footer(kFooter);
  tandem::cli::add_train(app);
  tandem::cli::add_finetune(app);
  tandem::cli::add_eval(app);
  tandem::cli::add_tune(app);
  tandem::cli::add_report(app);
  tandem::cli::add_doctor(app);
  tandem::cli::add_data(app);
  tandem::cli::add_tokenize(app);
  tandem::cli::add_trace(app);
  tandem::cli::add_generate(app);
  tandem::cli::add_serve(app);
  tandem::cli::add_bench(app);
  tandem::cli::add_plan(app);
  tandem::cli::add_fit(app);
  tandem::cli::add_check_layout(app);
  tandem::cli::add_launch(app);
  tandem::cli::add_info(app);
  tandem::cli::add_completion(app);
  app.add_subcommand("help", "Print the help of a command: tandem help COMMAND");
  app.add_subcommand("version", "Print version and commit");
  tandem::cli::check_option_values(app);
  try {
    return run(app, argc, argv);
  } catch (const tandem::Ended& end) {
    return end.exit_code;
  } catch (const CLI::ParseError& error) {
    return fail(2, tandem::cli::explain(app, error));
  } catch (const tandem::Error& error) {
    return fail(error.exit_code(), error.what());
  } catch (const std::bad_alloc& error) {
    return out_of_memory(error.what());
  } catch (const std::length_error&) {
    return out_of_memory("");
  } catch (const std::system_error& error) {
    return system_failed(error);
  } catch (const std::exception& error) {
    return fail(70, error.what() + while_doing(), "internal error");
  }
}
