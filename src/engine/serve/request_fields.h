// Fields of requests in JSON: which are known, and their values by type.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/system/printable.h"
#include "engine/model/config_value.h"
#include "engine/serve/completion_request.h"

namespace tandem {

/// Throws ApiError with status 400.
[[noreturn]] void reject(std::string_view name, const nlohmann::ordered_json& value,
                         std::string_view expected);

/// Whether the field is there and not null.
inline bool has(const nlohmann::ordered_json& root, std::string_view name) {
  const auto found = root.find(name);
  return found != root.end() && !found->is_null();
}

/// Replaces `to` by the field's value, if it has one. Throws ApiError for another type.
template <typename T>
void take(const nlohmann::ordered_json& root, std::string_view name, T& to) {
  if (!has(root, name)) return;
  const nlohmann::ordered_json& value = *root.find(name);
  const std::string_view expected = expected_type<T>(value);
  if (!expected.empty()) reject(name, value, expected);
  to = value.get<T>();
}

/// Refuses fields that would change the answer and are not supported. Those that change nothing,
/// by their name or their value, are taken; so is null. Throws ApiError.
void check_fields(const nlohmann::ordered_json& root, bool is_chat);

}  // namespace tandem
