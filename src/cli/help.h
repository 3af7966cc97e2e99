// Help that fits a terminal of 100 columns.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <string_view>

namespace tandem::cli {

constexpr size_t kHelpColumns = 100;

/// `text` as lines of at most kHelpColumns, broken at spaces: the first goes on after `used`
/// columns, the others begin with `indent` spaces.
std::string wrapped(std::string_view text, size_t used, size_t indent);

/// As CLI11 formats, with descriptions that are wrapped.
std::shared_ptr<CLI::FormatterBase> help_formatter();

}  // namespace tandem::cli
