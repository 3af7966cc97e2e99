// One-line messages for wrong command lines, with the nearest valid name.
#pragma once

#include <CLI/CLI.hpp>
#include <span>
#include <string>
#include <vector>

namespace tandem::cli {

/// Throws InvalidArgument if the first argument is neither an option of the program nor a command.
void check_command(const CLI::App& app, int argc, const char* const* argv);

/// Arguments after the program's name, last first, as CLI11 parses them; expands "--set a.b=1
/// c.d=2" to "--set a.b=1 --set c.d=2", so that an argument after the settings is not parsed as
/// one.
std::vector<std::string> reversed_arguments(int argc, const char* const* argv);

/// `error` as one line: the problem, a suggestion, and the help command.
std::string explain(const CLI::App& app, const CLI::ParseError& error);

/// `text` as a single line (`single_line`), with the middle removed if long.
std::string one_line(std::string text);

/// Command line of this process, and words joined into one string, quoted if needed.
std::vector<std::string> typed_words();
std::string joined(std::span<const std::string> words);

/// Rank of this process set by its launcher; empty without one.
std::string rank_of_launcher();
/// Whether this process reports for all: rank 0 under a launcher, or any other process.
bool speaks();

}  // namespace tandem::cli
