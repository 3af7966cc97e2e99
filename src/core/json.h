// Parsing of JSON from files with arbitrary content.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace tandem {

/// Far above the nesting of files that Tandem writes (less than ten).
constexpr int kMaxJsonDepth = 100;

/// Whether brackets outside strings are nested at most `kMaxJsonDepth` deep. Code on parsed JSON
/// recurses per level, so deeper text could overflow the stack.
bool json_depth_fits(std::string_view text);

/// Discarded (`is_discarded()`, neither object nor array) if `text` is no JSON or nested too deep.
template <typename Json = nlohmann::json>
Json parse_json(std::string_view text) {
  return json_depth_fits(text) ? Json::parse(text, nullptr, /*allow_exceptions=*/false)
                               : Json(Json::value_t::discarded);
}

}  // namespace tandem
