// Standard output and standard error, and what is said when the program fails at something that
// does not know what it is for.
#pragma once

#include <string>

namespace tandem::cli {

/// Writes what standard output has buffered. Throws IoError with the system's reason when any of it
/// could not be written; Ended, as a shell would end it, when nobody reads any more.
void finish_output();
/// The same for a failure that a write has met: `reason` is its errno, 0 if not known.
[[noreturn]] void throw_output_failed(int reason);

/// `text` and a newline on standard error. Where that cannot be written nobody can be told.
void complain(const std::string& text);
/// The same, for a reader, by the process that speaks for all under a launcher.
void note(const std::string& text);

/// What the program is at from here on, as in "training out/tiny".
void now_doing(std::string what);
/// "" before the first `now_doing`.
const std::string& doing();

}  // namespace tandem::cli
