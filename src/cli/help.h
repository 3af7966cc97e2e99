// Help formatting for terminals of 100 columns.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <string_view>

namespace tandem::cli {

constexpr size_t kHelpColumns = 100;

/// Wraps `text` at spaces to lines of at most kHelpColumns: the first starts after `used` columns,
/// the others are indented by `indent` spaces.
std::string wrapped(std::string_view text, size_t used, size_t indent);

/// CLI11's format with wrapped descriptions.
std::shared_ptr<CLI::FormatterBase> help_formatter();

/// Value of an option as its help shows it: "f32|bf16", "N", "FILE"; empty for a flag.
std::string value_of(const CLI::Option& option);

}  // namespace tandem::cli
