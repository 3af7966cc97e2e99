// --json of a command: its result as JSON, in a file beside the text or printed instead of it.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tandem::cli {

struct ResultOutput {
  std::string json;  ///< file, -: prints only the JSON, or empty

  bool shows_text() const { return json != "-"; }
  bool has_file() const { return !json.empty() && shows_text(); }
  /// Throws IoError, in the process that speaks, if the file could not be written.
  void check() const;
  /// Prints `text`, or only the JSON, and writes the file. Called by one rank.
  void write(std::string_view text, const nlohmann::ordered_json& result) const;
};

/// --json.
void add_json_option(CLI::App& command, ResultOutput& output);

}  // namespace tandem::cli
