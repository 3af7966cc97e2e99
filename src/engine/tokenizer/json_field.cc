#include "engine/tokenizer/json_field.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/system/json.h"
#include "core/system/printable.h"
#include "engine/tokenizer/unicode/byte_characters.h"
#include "engine/tokenizer/unicode/unicode.h"
#include "tandem/error.h"

namespace tandem {

using nlohmann::json;

void refuse(const std::string& key, const json& value, const char* expected) {
  // Nested values may be deeper than the stack.
  const bool is_nested = value.is_structured() && std::ranges::any_of(value, &json::is_structured);
  const std::string text =
      is_nested ? fmt::format("{} of {}", value.is_array() ? "a list" : "an object", value.size())
                : dump_json(value);
  throw ConfigError(fmt::format("{} is {}: expected {}", key, printable(text, 80), expected));
}

const json& member(const json& object, const char* name) {
  static const json null;
  if (!object.is_object()) return null;
  const auto found = object.find(name);
  return found == object.end() ? null : *found;
}

std::string Field::text(const char* expected) const {
  if (!value.is_string()) refuse(key, value, expected);
  return value.get<std::string>();
}

bool Field::flag(bool otherwise) const {
  if (value.is_null()) return otherwise;
  if (!value.is_boolean()) refuse(key, value, "true or false");
  return value.get<bool>();
}

int64_t Field::number() const {
  if (!value.is_number_integer()) refuse(key, value, "a whole number");
  return value.get<int64_t>();
}

double Field::real() const {
  if (!value.is_number()) refuse(key, value, "a number");
  return value.get<double>();
}

std::vector<Field> Field::list() const {
  if (!value.is_array()) refuse(key, value, "a list");
  std::vector<Field> items;
  for (size_t i = 0; i < value.size(); ++i) {
    items.push_back({value[i], fmt::format("{}[{}]", key, i)});
  }
  return items;
}

void Field::require_empty(const char* name) const {
  const Field field = (*this)[name];
  const bool is_empty = field.is_null() || field.value == "" || field.value == false ||
                        (field.value.is_number() && field.value == 0);
  if (!is_empty) refuse(field.key, field.value, "null");
}

Pattern read_pattern(const Field& field) {
  try {
    if (!field["String"].is_null()) return Pattern::literal(field["String"].text());
    return Pattern(field["Regex"].text("a pattern {\"Regex\": ...} or {\"String\": ...}"));
  } catch (const ConfigError& failed) {
    throw ConfigError(fmt::format("{}: {}", field.key, failed.what()));
  }
}

std::vector<Field> steps_of(const Field& field, const char* list) {
  if (field.is_null()) return {};
  if (field["type"].text("an object with a type") != "Sequence") return {field};
  std::vector<Field> steps;
  for (const Field& item : field[list].list()) {
    if (item["type"].text("an object with a type") == "Sequence") {
      refuse(item.key, item["type"].value, "no Sequence in a Sequence");
    }
    steps.push_back(item);
  }
  return steps;
}

Normalization read_normalization(const Field& step) {
  const std::string type = step["type"].text();
  if (type == "NFC") return {Normalization::Kind::nfc};
  constexpr std::pair<std::string_view, std::string (*)(std::string_view)> kChanges[] = {
      {"NFD", unicode::to_nfd},   {"NFKC", unicode::to_nfkc},
      {"NFKD", unicode::to_nfkd}, {"StripAccents", unicode::strip_accents},
      {"Nmt", unicode::to_nmt},   {"Lowercase", unicode::to_lower}};
  for (const auto& [name, change] : kChanges) {
    if (type == name) return {.kind = Normalization::Kind::change, .change = change};
  }
  if (type == "Prepend") return {Normalization::Kind::prepend, "", step["prepend"].text()};
  if (type == "Strip") {
    return {.kind = Normalization::Kind::strip,
            .strips_left = step["strip_left"].flag(true),
            .strips_right = step["strip_right"].flag(true)};
  }
  if (type == "Precompiled") {
    const Field map = step["precompiled_charsmap"];
    const std::optional<std::string> bytes = bytes_of_base64(map.text());
    if (!bytes) refuse(map.key, map.value, "a map in base64");
    return {.kind = Normalization::Kind::clusters,
            .characters = std::make_shared<CharacterMap>(*bytes)};
  }
  if (type != "Replace") {
    refuse(step.key + ".type", step["type"].value,
           "NFC, NFD, NFKC, NFKD, Lowercase, Nmt, Precompiled, Prepend, Replace, Strip or "
           "StripAccents");
  }
  const Field pattern = step["pattern"];
  if (pattern["String"].is_null()) {
    return {.kind = Normalization::Kind::matches,
            .to = step["content"].text(),
            .pattern = read_pattern(pattern)};
  }
  Normalization replace{Normalization::Kind::replace, pattern["String"].text(),
                        step["content"].text()};
  if (replace.from.empty()) refuse(pattern.key, pattern.value, "a text");
  return replace;
}

}  // namespace tandem
