// One-line messages for wrong command lines, with the nearest valid name.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace tandem::cli {

/// Throws InvalidArgument when the first argument is neither an option nor a command.
void check_command(const CLI::App& app, int argc, const char* const* argv);

/// `error` as one line: what is wrong, what was meant, where the help is.
std::string explain(const CLI::App& app, const CLI::ParseError& error);

}  // namespace tandem::cli
