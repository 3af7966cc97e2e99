#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "core/system/json.h"
#include "engine/config/config.h"

namespace tandem {
namespace {

struct Describe {
  const ConfigKey& key;
  std::string operator()(int64_t* value) const {
    return fmt::format("integer {}, {:.10g} to {:.10g}", *value, key.range.min, key.range.max);
  }
  std::string operator()(double* value) const {
    return fmt::format("number {:g}, {:.7g} to {:.7g}", *value, key.range.min, key.range.max);
  }
  std::string operator()(bool* value) const { return fmt::format("boolean {}", *value); }
  std::string operator()(std::string* value) const {
    return key.range.choices().empty()
               ? fmt::format("string \"{}\"", *value)
               : fmt::format("string \"{}\", of {}", *value, fmt::join(key.range.choices(), ", "));
  }
  std::string operator()(std::vector<std::string>* value) const {
    return fmt::format("strings [{}]", fmt::join(*value, ", "));
  }
  std::string operator()(std::vector<int64_t>* value) const {
    return fmt::format("integers [{}], {:.10g} to {:.10g}", fmt::join(*value, ", "), key.range.min,
                       key.range.max);
  }
};

/// A basic string, whose escapes JSON has, too.
std::string quoted(const std::string& text) {
  return dump_json(nlohmann::json(text));
}

struct AsToml {
  std::string operator()(const int64_t* value) const { return fmt::format("{}", *value); }
  std::string operator()(const double* value) const { return fmt::format("{}", *value); }
  std::string operator()(const bool* value) const { return fmt::format("{}", *value); }
  std::string operator()(const std::string* value) const { return quoted(*value); }
  std::string operator()(const std::vector<std::string>* value) const {
    std::vector<std::string> all;
    for (const std::string& each : *value) all.push_back(quoted(each));
    return fmt::format("[{}]", fmt::join(all, ", "));
  }
  std::string operator()(const std::vector<int64_t>* value) const {
    return fmt::format("[{}]", fmt::join(*value, ", "));
  }
};

}  // namespace

std::string describe_config_keys() {
  TrainConfig defaults;
  std::string text;
  for (const ConfigKey& key : config_keys()) {
    text += fmt::format("{:<30} {} ({})\n", key.name, key.help,
                        std::visit(Describe{key}, key.slot(defaults)));
  }
  return text;
}

std::vector<KeyDifference> differing_keys(const TrainConfig& before, const TrainConfig& after) {
  TrainConfig copies[] = {before, after};
  std::vector<KeyDifference> differences;
  for (const ConfigKey& key : config_keys()) {
    const std::string was = std::visit(AsToml(), key.slot(copies[0]));
    const std::string is = std::visit(AsToml(), key.slot(copies[1]));
    if (was != is) differences.push_back({key.name, was, is});
  }
  return differences;
}

}  // namespace tandem
