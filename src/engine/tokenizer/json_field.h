// Values of tokenizer.json with their names in messages.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/tokenizer/pattern.h"
#include "engine/tokenizer/unicode/normalization.h"

namespace tandem {

/// Throws ConfigError: "KEY is VALUE: expected EXPECTED".
[[noreturn]] void refuse(const std::string& key, const nlohmann::json& value, const char* expected);
/// An object's member; null if there is none.
const nlohmann::json& member(const nlohmann::json& object, const char* name);

/// An object's value, with its name in messages. Functions throw ConfigError for a value of another
/// type.
struct Field {
  const nlohmann::json& value;
  std::string key;

  Field operator[](const char* name) const { return {member(value, name), key + "." + name}; }
  bool is_null() const { return value.is_null(); }
  std::string text(const char* expected = "a text") const;
  bool flag(bool otherwise) const;
  int64_t number() const;
  double real() const;
  std::vector<Field> list() const;
  void require_empty(const char* name) const;
};

/// "Regex" or "String" of a pattern.
Pattern read_pattern(const Field& field);
/// All members of a "Sequence" in `list`, or the step itself.
std::vector<Field> steps_of(const Field& field, const char* list);
/// A step of "normalizer".
Normalization read_normalization(const Field& step);

}  // namespace tandem
