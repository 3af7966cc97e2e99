// Values of templates: JSON, or undefined, a namespace or a macro. Texts and comparisons are those
// of Python. An integer beyond 64 bits is its digits, of type binary (core/system/json.h).
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/error.h"

namespace tandem::jinja {

/// Array of Json: a list of Python, or what prints in another form.
template <typename... Arguments>
class Sequence : public std::vector<Arguments...> {
 public:
  enum class Kind : uint8_t { list, tuple, group, items, keys, values };  // group: of groupby
  using std::vector<Arguments...>::vector;
  Kind kind = Kind::list;
};
using Json = nlohmann::basic_json<nlohmann::ordered_map, Sequence>;
using SequenceKind = Json::array_t::Kind;

struct Node;
struct Frame;  // of jinja_interpreter.h

/// Throws ConfigError with `what`.
[[noreturn]] void fail(const std::string& what);

constexpr size_t kMaxText = size_t{32} << 20;  ///< bytes of a text, or of all that operators make
/// Throws ConfigError for more bytes than kMaxText.
void check_text(size_t bytes);

struct Value {
  Value() = default;
  Value(Json json) : data(std::make_shared<const Json>(std::move(json))) {}
  /// Element of the value `owner`.
  Value(const Value& owner, const Json& element) : data(owner.data, &element) {}

  bool is_defined() const { return data || space || macro; }
  bool is_string() const { return data && data->is_string(); }
  bool is_list() const { return data && data->is_array(); }
  bool is_tuple() const;  ///< also a list
  bool is_dict() const { return data && data->is_object(); }
  bool is_none() const { return data && data->is_null(); }
  bool is_int() const { return data && data->is_number_integer(); }
  bool is_number() const { return data && data->is_number(); }
  bool is_bool() const { return data && data->is_boolean(); }
  bool is_big() const { return data && data->is_binary(); }
  /// A number, or a boolean as one.
  bool is_numeric() const { return is_number() || is_bool(); }
  double number() const { return is_bool() ? double(data->get<bool>()) : data->get<double>(); }
  /// Throws ConfigError for another type; `what` names the value.
  const std::string& string(std::string_view what) const;
  int64_t integer(std::string_view what) const;
  const Json& json(std::string_view what) const;

  std::shared_ptr<const Json> data;  ///< nullptr if undefined, or a namespace or macro
  std::shared_ptr<Json> space;       ///< attributes of a namespace
  const Node* macro = nullptr;
  std::shared_ptr<Frame> frame;  ///< variables that a macro sees, or what `loop` is
};

/// An array as a sequence of this kind.
Json make_sequence(Json array, SequenceKind kind);
SequenceKind kind_of(const Json& array);

bool is_true(const Value& value);
/// str() of Python, "" if undefined.
std::string to_text(const Value& value);
/// repr() of Python.
std::string python_text(const Json& json);
struct JsonStyle {
  std::optional<std::string> indent = {};  ///< of a level; nullopt: one line
  std::string item_separator = ", ", key_separator = ": ";
  bool escapes = false;  ///< characters beyond ASCII
  bool sorts_keys = false;
};
/// Transformers' filter of this name. Bytes that are not UTF-8 become U+FFFD. Throws ConfigError
/// for more than kMaxText.
std::string to_json_text(const Json& json, const JsonStyle& style);
bool equals(const Value& a, const Value& b);
/// Lists and tuples are ordered by their first elements that differ. Throws ConfigError if the two
/// cannot be ordered.
bool is_less(const Value& a, const Value& b);
bool contains(const Value& all, const Value& one);
/// Elements of a list, keys of a dictionary, characters of a string, nothing of undefined.
std::vector<Value> elements(const Value& value);
/// Element of a list, or character of a string, counted from the end if below 0; undefined if there
/// is none.
Value element_at(const Value& value, int64_t index);
/// Characters of UTF-8.
std::vector<std::string> characters(std::string_view text);
/// Bytes of white space at the begin.
size_t leading_space(std::string_view text);
/// Without white space, or the characters `set`, at its ends.
std::string strip(std::string_view text, bool left, bool right, const std::string* set = nullptr);

}  // namespace tandem::jinja
