// Parsing of JSON from files with arbitrary content, and JSON text of arbitrary strings.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <type_traits>

namespace tandem {

/// Far above the nesting of files that Tandem writes (less than ten).
constexpr int kMaxJsonDepth = 100;

/// Whether `text` may be parsed: it has no zero byte, which the library takes for its end, and
/// brackets outside strings are nested at most `kMaxJsonDepth` deep. Code on parsed JSON recurses
/// per level, so deeper text could overflow the stack.
bool may_be_json(std::string_view text);

/// Parses like the library's parser, which compares each key with all before it, but in linear
/// time.
nlohmann::ordered_json parse_ordered_json(std::string_view text, bool keeps_integers = false);

/// Discarded (`is_discarded()`, neither object nor array) if `text` is no JSON or nested too deep.
template <typename Json = nlohmann::json>
Json parse_json(std::string_view text) {
  if (!may_be_json(text)) return Json(Json::value_t::discarded);
  if constexpr (std::is_same_v<Json, nlohmann::ordered_json>) {
    return parse_ordered_json(text);
  } else {
    return Json::parse(text, nullptr, /*allow_exceptions=*/false);
  }
}

/// parse_json, but an integer beyond 64 bits is its digits, as a value of type binary.
nlohmann::ordered_json parse_json_exactly(std::string_view text);

/// Reason why the functions above discard `text`, on one line.
std::string json_error(std::string_view text);

/// Text of `json`, on one line or indented by `indent` spaces. Bytes of strings that are not UTF-8,
/// as file names and environment variables may have, become U+FFFD, where `dump` would throw.
template <typename Json>
std::string dump_json(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace tandem
