#include "core/system/json.h"

#include <fmt/format.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/system/printable.h"

namespace tandem {
namespace {

using Ordered = nlohmann::ordered_json;

/// Keys of an object for which comparing all is faster than a table.
constexpr size_t kFewKeys = 16;

/// Builds the JSON that the library's parser reads.
class OrderedBuilder : public nlohmann::json_sax<Ordered> {
 public:
  explicit OrderedBuilder(bool keeps_integers) : keeps_integers_(keeps_integers) {}
  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(Ordered::number_integer_t value) override { return add(value); }
  bool number_unsigned(Ordered::number_unsigned_t value) override { return add(value); }
  bool number_float(Ordered::number_float_t value, const std::string& text) override {
    if (!keeps_integers_ || text.find_first_not_of("-0123456789") != text.npos) return add(value);
    return add(Ordered::binary(std::vector<uint8_t>(text.begin(), text.end())));
  }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(Ordered::binary_t&) override { return false; }  // not in text
  bool start_object(size_t) override { return open(Ordered::object()); }
  bool start_array(size_t) override { return open(Ordered::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(size_t, const std::string&, const Ordered::exception&) override { return false; }
  bool key(std::string& name) override {
    Level& level = levels_.back();
    auto& members = level.json->get_ref<Ordered::object_t&>();
    if (members.size() < kFewKeys) {
      next_ = &members[name];
      return true;
    }
    if (level.indices.empty()) {
      for (size_t i = 0; i < members.size(); ++i) level.indices[members.data()[i].first] = i;
    }
    const auto [found, is_new] = level.indices.try_emplace(name, members.size());
    if (is_new) {
      using Pairs = std::vector<Ordered::object_t::value_type>;
      static_cast<Pairs&>(members).emplace_back(std::move(name), nullptr);
    }
    next_ = &members.data()[found->second].second;
    return true;
  }

  Ordered take() { return std::move(root_); }

 private:
  struct Level {
    Ordered* json;
    std::unordered_map<std::string, size_t> indices;  ///< of keys, once they are many
  };

  Ordered& next_value() {
    if (levels_.empty()) return root_;
    if (levels_.back().json->is_object()) return *next_;
    return levels_.back().json->emplace_back(nullptr);
  }
  bool add(Ordered value) {
    next_value() = std::move(value);
    return true;
  }
  bool open(Ordered value) {
    Ordered& json = next_value();
    json = std::move(value);
    levels_.push_back({&json, {}});
    return true;
  }
  bool close() {
    levels_.pop_back();
    return true;
  }

  const bool keeps_integers_;
  Ordered root_;
  std::vector<Level> levels_;
  Ordered* next_ = nullptr;  ///< value of the last key
};

}  // namespace

bool may_be_json(std::string_view text) {
  if (text.find('\0') != text.npos) return false;
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      i += c == '\\';
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxJsonDepth) return false;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return true;
}

Ordered parse_ordered_json(std::string_view text, bool keeps_integers) {
  OrderedBuilder builder(keeps_integers);
  return Ordered::sax_parse(text, &builder) ? builder.take() : Ordered(Ordered::value_t::discarded);
}

Ordered parse_json_exactly(std::string_view text) {
  return may_be_json(text) ? parse_ordered_json(text, true) : Ordered(Ordered::value_t::discarded);
}

std::string json_error(std::string_view text) {
  if (text.find_first_not_of(" \t\r\n") == text.npos) return "it is empty";
  if (const size_t at = text.find('\0'); at != text.npos) {
    return fmt::format("byte {} is zero", at + 1);
  }
  if (!may_be_json(text)) return fmt::format("nested more than {} deep", kMaxJsonDepth);
  try {
    const auto parsed = nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {  // [json.exception.parse_error.101] parse …
    const std::string_view what = error.what();
    const size_t name_end = what.find("] ");
    return printable(what.substr(name_end == what.npos ? 0 : name_end + 2), 200);
  }
  return "it is JSON";
}

}  // namespace tandem
