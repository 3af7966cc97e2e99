// JSON that comes from files: any bytes at all.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace tandem {

/// What Tandem writes is nested less than ten deep.
constexpr int kMostJsonDepth = 100;

/// Whether brackets outside strings are nested at most `kMostJsonDepth` deep. What works on parsed
/// JSON calls itself for every level, so that deeper text could use up the stack.
bool json_depth_fits(std::string_view text);

/// Discarded (`is_discarded()`, and neither object nor array) where `text` is no JSON, or nested
/// too deep.
template <typename Json = nlohmann::json>
Json parse_json(std::string_view text) {
  return json_depth_fits(text) ? Json::parse(text, nullptr, /*allow_exceptions=*/false)
                               : Json(Json::value_t::discarded);
}

}  // namespace tandem
