#include "cli/result_output.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/output.h"

namespace tandem::cli {

void ResultOutput::check() const {
  if (speaks() && has_file()) check_writable(json);
}

void ResultOutput::write(std::string_view text, const nlohmann::ordered_json& result) const {
  const std::string dumped = dump_json(result, 1) + "\n";
  fmt::print("{}", shows_text() ? text : dumped);
  if (has_file()) write_output(json, dumped);
  finish_output();
}

void add_json_option(CLI::App& command, ResultOutput& output) {
  command.add_option("--json", output.json, "Write the result to FILE (-: print only it)");
}

}  // namespace tandem::cli
