// --json of a command: its result as JSON, in a file beside the text or printed instead of it.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tandem::cli {

struct ResultOutput {
  std::string json;  ///< file, -: prints only the JSON, or empty

  bool is_given() const { return !json.empty(); }
  bool shows_text() const { return json != "-"; }
  bool has_file() const { return is_given() && shows_text(); }
  /// Throws IoError, in the process that speaks, if the file could not be written.
  void check() const;
  /// Writes `dumped`, JSON, to the file or prints it, if one of them is wanted. Called by one rank.
  void write_json(std::string_view dumped) const;
  /// Prints `text`, or only the JSON, and writes the file. Called by one rank.
  void write(std::string_view text, const nlohmann::ordered_json& result) const;
};

/// --json, which writes `what`, as "the results".
CLI::Option* add_json_option(CLI::App& command, ResultOutput& output,
                             std::string_view what = "the results", std::string_view only = "them");

}  // namespace tandem::cli
