// Values of JSON by type. Every error is a ConfigError that names file, key and value.
#pragma once

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {

[[noreturn]] inline void reject_value(const std::string& file, std::string_view key,
                                      const nlohmann::ordered_json& value,
                                      std::string_view expected) {
  throw ConfigError(
      fmt::format("{}: {} = {}: expected {}", file, key, printable(value.dump()), expected));
}

/// Type that a JSON value must have to be a T, for messages; empty if it has it.
template <typename T>
std::string_view expected_type(const nlohmann::ordered_json& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value.is_boolean() ? "" : "true or false";
  } else if constexpr (std::is_same_v<T, int64_t>) {
    if (!value.is_number_integer()) return "an integer";
    const bool is_large = value.is_number_unsigned() &&
                          value.get<uint64_t>() > uint64_t(std::numeric_limits<int64_t>::max());
    return is_large ? "an integer below 2^63" : "";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return value.is_string() ? "" : "a string";
  } else {
    return value.is_number() ? "" : "a number";
  }
}

inline bool has_value(const nlohmann::ordered_json& root, const char* key) {
  return root.contains(key) && !root[key].is_null();
}

template <typename T>
T parse_value(const nlohmann::ordered_json& value, std::string_view key, const std::string& file) {
  const std::string_view expected = expected_type<T>(value);
  if (!expected.empty()) reject_value(file, key, value, expected);
  return value.get<T>();
}

}  // namespace tandem
