// One-line messages for wrong command lines, with the nearest valid name.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace tandem::cli {

/// Throws InvalidArgument if the first argument is neither an option of the program nor a command.
void check_command(const CLI::App& app, int argc, const char* const* argv);

/// The command line with `help [COMMAND …]` as `[COMMAND …] --help`, and `version` as `--version`.
std::vector<const char*> expand_words(int argc, const char* const* argv);

/// Arguments after the program's name, last first, as CLI11 parses them; expands "--set a.b=1
/// c.d=2" to "--set a.b=1 --set c.d=2", so that an argument after the settings is not parsed as
/// one.
std::vector<std::string> reversed_arguments(int argc, const char* const* argv);

/// `error` as one line: the problem, a suggestion, and the help command.
std::string explain(const CLI::App& app, const CLI::ParseError& error);

/// `text` as a single line (`single_line`), with the middle removed if long.
std::string one_line(std::string text);

/// --init of a command that reads a model's shape, not its weights.
CLI::Option* add_init_option(CLI::App& command, std::string& init);

}  // namespace tandem::cli
