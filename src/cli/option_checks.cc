#include "cli/option_checks.h"

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <system_error>

#include "cli/help.h"

namespace tandem::cli {
namespace {

/// Empty, or what is wrong, as for all that follow.
template <typename Integer>
std::string check_integer(const std::string& typed) {
  Integer value = 0;
  const auto [end, code] = std::from_chars(typed.data(), typed.data() + typed.size(), value);
  return code == std::errc::result_out_of_range ? typed + ": expected an integer of 64 bits" : "";
}

std::string check_number(const std::string& typed) {
  return std::isnan(std::strtod(typed.c_str(), nullptr)) ? typed + ": expected a number" : "";
}

std::string check_name(const std::string& typed) {
  return typed.empty() ? "'': expected the name of a file or folder" : "";
}

}  // namespace

void check_option_values(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name(), value = value_of(*option);
    if (type.starts_with("INT")) option->check(check_integer<int64_t>);
    if (type.starts_with("UINT")) option->check(check_integer<uint64_t>);
    if (type.starts_with("FLOAT")) option->check(check_number);
    if (value == "FILE" || value == "FOLDER" || value == "PREFIX") option->check(check_name);
  }
  for (CLI::App* command : app.get_subcommands({})) check_option_values(*command);
}

}  // namespace tandem::cli
