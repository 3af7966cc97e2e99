// Checks of what is typed for options, by the kind of their value.
#pragma once

#include <CLI/CLI.hpp>

namespace tandem::cli {

/// Refuses integers beyond 64 bits, which CLI11 would clamp, NaN, which its ranges let through, and
/// empty names of files and folders, as of a variable that is not set, which commands would take
/// for none given. Of all options that the command and those below it have by now.
void check_option_values(CLI::App& app);

}  // namespace tandem::cli
