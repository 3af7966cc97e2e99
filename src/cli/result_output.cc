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

void ResultOutput::write_json(std::string_view dumped) const {
  if (is_given()) shows_text() ? write_output(json, dumped) : fmt::print("{}", dumped);
}

void ResultOutput::write(std::string_view text, const nlohmann::ordered_json& result) const {
  if (shows_text()) fmt::print("{}", text);
  if (is_given()) write_json(dump_json(result, 1) + "\n");
  finish_output();
}

CLI::Option* add_json_option(CLI::App& command, ResultOutput& output, std::string_view what,
                             std::string_view only) {
  return command.add_option("--json", output.json,
                            fmt::format("Write {} to FILE (-: print only {})", what, only));
}

}  // namespace tandem::cli
