// Standard output, standard error, and the context of errors that carry none.
#pragma once

#include <string>

namespace tandem {

/// Thrown by work that has reported how it ended, to set the exit code.
struct Ended {
  int exit_code;
};

/// Rank of this process set by its launcher; empty without one.
std::string rank_of_launcher();
/// Whether this process reports for all: rank 0 under a launcher, or any other process.
bool speaks();

/// Flushes standard output. Throws IoError with the system's reason if any of it could not be
/// written; Ended with a shell's exit code if the reader has closed it.
void finish_output();
/// Reports a failed write: `reason` is its errno, 0 if unknown.
[[noreturn]] void throw_output_failed(int reason);

/// Writes `text` and a newline to standard error, ignoring write errors.
void complain(const std::string& text);
/// Prints a single-line note, only from the process that reports under a launcher.
void note(const std::string& text);

/// Sets the current activity, such as "training out/tiny".
void now_doing(std::string what);
/// Current activity; "" before the first `now_doing`.
const std::string& doing();

}  // namespace tandem
