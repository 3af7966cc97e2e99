#include "engine/config/config_paths.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <string_view>

#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// The weight's text and its spaces, or an empty string.
std::string weight_prefix(const std::string& entry) {
  const size_t end = entry.find(' ');
  if (end == entry.npos || std::string_view("0123456789.-").find(entry[0]) == std::string::npos) {
    return "";  // as are "nan x" and "infinity"
  }
  double weight = 0;
  const auto [last, error] = std::from_chars(entry.data(), entry.data() + end, weight);
  if (error == std::errc::invalid_argument || last != entry.data() + end) return "";
  return entry.substr(0, std::min(entry.size(), entry.find_first_not_of(' ', end)));
}

}  // namespace

WeightedPath parse_weighted_path(const std::string& entry) {
  const std::string prefix = weight_prefix(entry);
  WeightedPath result{0, entry.substr(prefix.size())};
  if (!prefix.empty()) std::from_chars(prefix.data(), prefix.data() + prefix.size(), result.weight);
  return result;
}

std::string make_relative_to(const std::string& entry, const std::string& folder) {
  const std::string prefix = weight_prefix(entry);
  const std::filesystem::path path = entry.substr(prefix.size());
  if (path.empty() || path.is_absolute()) return entry;
  return prefix + (std::filesystem::path(folder) / path).lexically_normal().string();
}

void check_weights(const std::vector<std::string>& entries, const std::string& key) {
  size_t num_weighted = 0;
  for (const std::string& entry : entries) {
    if (weight_prefix(entry).empty()) continue;
    ++num_weighted;
    const WeightedPath parsed = parse_weighted_path(entry);
    if (parsed.path.empty() || !(parsed.weight > 0) || !std::isfinite(parsed.weight)) {
      throw ConfigError(fmt::format(
          "{}: \"{}\": expected a weight above 0 and a path, \"0.7 PATH\"", key, printable(entry)));
    }
  }
  if (num_weighted == 0 || num_weighted == entries.size()) return;
  const auto without = std::ranges::find_if(
      entries, [](const std::string& entry) { return weight_prefix(entry).empty(); });
  throw ConfigError(fmt::format("{}: \"{}\" has no weight: expected one as in the other entries",
                                key, printable(*without)));
}

}  // namespace tandem
