// Values of config.json by type. Every error is a ConfigError that names file, key and value.
#pragma once

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/printable.h"
#include "tandem/error.h"

namespace tandem {

[[noreturn]] inline void reject_value(const std::string& file, std::string_view key,
                                      const nlohmann::ordered_json& value,
                                      std::string_view expected) {
  throw ConfigError(
      fmt::format("{}: {} = {}: expected {}", file, key, printable(value.dump()), expected));
}

template <typename T>
T parse_value(const nlohmann::ordered_json& value, std::string_view key, const std::string& file) {
  const auto reject = [&](const char* expected) { reject_value(file, key, value, expected); };
  if constexpr (std::is_same_v<T, bool>) {
    if (!value.is_boolean()) reject("true or false");
  } else if constexpr (std::is_same_v<T, int64_t>) {
    if (!value.is_number_integer()) reject("an integer");
    if (value.is_number_unsigned() &&
        value.get<uint64_t>() > uint64_t(std::numeric_limits<int64_t>::max())) {
      reject("an integer below 2^63");
    }
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (!value.is_string()) reject("a string");
  } else {
    if (!value.is_number()) reject("a number");
  }
  return value.get<T>();
}

}  // namespace tandem
