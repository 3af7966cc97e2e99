// One-line messages for wrong command lines, with the nearest valid name.
#pragma once

#include <CLI/CLI.hpp>
#include <span>
#include <string>
#include <vector>

namespace tandem::cli {

/// Throws InvalidArgument when the first argument is neither an option of the program nor a
/// command.
void check_command(const CLI::App& app, int argc, const char* const* argv);

/// What follows the program's name, as CLI11 parses it, last first; "--set a.b=1 c.d=2" as
/// "--set a.b=1 --set c.d=2", so that what stands after the settings is not taken for one.
std::vector<std::string> reversed_arguments(int argc, const char* const* argv);

/// `error` as one line: what is wrong, what was meant, where the help is.
std::string explain(const CLI::App& app, const CLI::ParseError& error);

/// `text` as `single_line` has it, and without its middle where it is long.
std::string one_line(std::string text);

/// The command line of this process, and words as one, quoted where they need it.
std::vector<std::string> typed_words();
std::string joined(std::span<const std::string> words);

/// This process's rank as its launcher says; empty where there is none.
std::string rank_of_launcher();
/// Under a launcher one process speaks for all.
bool speaks();

}  // namespace tandem::cli
