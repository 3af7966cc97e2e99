#include "engine/chat/jinja/jinja_text.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/chat/jinja/jinja_case.h"

namespace tandem::jinja {
namespace {

constexpr int64_t kMaxWidth = 10'000;

/// Bytes of the line end that `text` begins with.
size_t line_end_bytes(std::string_view text) {
  if (text.starts_with("\r\n")) return 2;
  for (const std::string_view end :
       {"\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\u0085", "\u2028", "\u2029"}) {
    if (text.starts_with(end)) return end.size();
  }
  return 0;
}

std::vector<std::string> split_blank(std::string_view text, int64_t max, bool from_end) {
  struct Word {
    size_t begin, end;
  };
  std::vector<Word> words;
  for (size_t at = leading_space(text); at < text.size();) {
    Word word{at, at};
    size_t blank = 0;
    while (word.end < text.size() && blank == 0) {
      do ++word.end;
      while (word.end < text.size() && (uint8_t(text[word.end]) & 0xc0) == 0x80);
      blank = leading_space(text.substr(word.end));
    }
    words.push_back(word);
    at = word.end + blank;
  }
  const size_t divided = max < 0 ? words.size() : std::min(words.size(), size_t(max));
  const size_t whole = words.size() - divided;  // of the text that is not divided
  std::vector<std::string> all;
  const auto add = [&](size_t begin, size_t end) {
    all.emplace_back(text.substr(begin, end - begin));
  };
  if (from_end && whole > 0) add(0, words[whole - 1].end);
  for (size_t i = 0; i < divided; ++i) {
    const Word& word = words[from_end ? whole + i : i];
    add(word.begin, word.end);
  }
  if (!from_end && whole > 0) add(words[divided].begin, text.size());
  return all;
}

const std::string& text_of(const Value& value) {
  return value.string("method");
}
Value text(std::string value) {
  return {Json(std::move(value))};
}

/// Section [start, end) of a text by characters, as Python's methods take it: bytes.
struct Section {
  std::string_view text;
  int64_t begin;  ///< characters before it
  bool is_valid;
};
Section section(const std::string& all, const Value& start, const Value& end) {
  const int64_t size = count_characters(all);
  const auto clamp = [&](int64_t i) { return std::clamp<int64_t>(i < 0 ? i + size : i, 0, size); };
  const int64_t first = integer(start, 0, "start");
  const int64_t begin = clamp(first), stop = clamp(integer(end, size, "end"));
  if (begin > stop || first > size) return {"", begin, false};
  const auto bytes = [&](int64_t count) {
    size_t at = 0;
    for (; at < all.size(); ++at) {
      if ((uint8_t(all[at]) & 0xc0) != 0x80 && count-- == 0) break;
    }
    return at;
  };
  const size_t from = bytes(begin);
  return {std::string_view(all).substr(from, bytes(stop) - from), begin, true};
}

Value affix(const Value& value, const Bound& a, bool is_prefix) {
  const Section found = section(text_of(value), a[1], a[2]);
  const auto holds = [&](const Value& affix) {
    const std::string& wanted = affix.string(is_prefix ? "startswith" : "endswith");
    return found.is_valid &&
           (is_prefix ? found.text.starts_with(wanted) : found.text.ends_with(wanted));
  };
  if (!a[0].is_tuple()) return {Json(holds(a[0]))};
  return {Json(std::ranges::any_of(elements(a[0]), holds))};
}

int64_t position(const Value& value, const Bound& a, bool is_last) {
  const Section found = section(text_of(value), a[1], a[2]);
  const std::string& wanted = a[0].string("find");
  const size_t at = is_last ? found.text.rfind(wanted) : found.text.find(wanted);
  if (!found.is_valid || at == std::string_view::npos) return -1;
  return found.begin + count_characters(found.text.substr(0, at));
}

Value required_position(const Value& value, const Bound& a, bool is_last) {
  const int64_t at = position(value, a, is_last);
  if (at < 0) fail("index: the string is not there");
  return {Json(at)};
}

Value count(const Value& value, const Bound& a) {
  const Section found = section(text_of(value), a[1], a[2]);
  const std::string& wanted = a[0].string("count");
  if (!found.is_valid) return {Json(0)};
  if (wanted.empty()) return {Json(count_characters(found.text) + 1)};
  int64_t number = 0;
  for (size_t at = 0; (at = found.text.find(wanted, at)) != std::string_view::npos;
       at += wanted.size()) {
    ++number;
  }
  return {Json(number)};
}

Value strip_method(const Value& value, const Bound& a, bool left, bool right) {
  const bool has_set = a[0].is_defined() && !a[0].is_none();
  return text(strip(text_of(value), left, right, has_set ? &a[0].string("strip") : nullptr));
}

Value split_method(const Value& value, const Bound& a, bool from_end) {
  const bool has_separator = a[0].is_defined() && !a[0].is_none();
  return make_strings(split(text_of(value), has_separator ? &a[0].string("split") : nullptr,
                            integer(a[1], -1, "maxsplit"), from_end));
}

Value partition(const Value& value, const Bound& a, bool is_last) {
  const std::string &all = text_of(value), &by = a[0].string("partition");
  if (by.empty()) fail("partition '': expected at least one character");
  const size_t at = is_last ? all.rfind(by) : all.find(by);
  std::vector<std::string> three{all.substr(0, at), by, ""};
  if (at != std::string::npos) {
    three[2] = all.substr(at + by.size());
  } else {
    three = is_last ? std::vector<std::string>{"", "", all} : std::vector<std::string>{all, "", ""};
  }
  return make_sequence(Json(three), SequenceKind::tuple);
}

Value pad_method(const Value& value, const Bound& a, bool left, bool right) {
  const std::string fill = a[1].is_defined() ? a[1].string("fillchar") : " ";
  if (count_characters(fill) != 1) fail("fillchar: expected one character");
  return text(pad(text_of(value), a[0].integer("width"), fill, left, right));
}

Value zfill(const Value& value, const Bound& a) {
  const std::string& all = text_of(value);
  const size_t sign = all.starts_with('-') || all.starts_with('+') ? 1 : 0;
  const int64_t width = a[0].integer("width") - int64_t(sign);
  return text(all.substr(0, sign) + pad(all.substr(sign), width, "0", true, false));
}

Value are_all(const Value& value, Letters letters) {
  return {Json(consists_of(text_of(value), letters))};
}

Value join_method(const Value& value, const Bound& a) {
  std::string all;
  bool is_first = true;
  for (const Value& each : elements(a[0])) {
    if (!std::exchange(is_first, false)) all += text_of(value);
    all += each.string("join");
    check_text(all.size());
  }
  return text(all);
}

Value remove_affix(const Value& value, const Bound& a, bool is_prefix) {
  const std::string &all = text_of(value), &affix = a[0].string("affix");
  if (is_prefix ? !all.starts_with(affix) : !all.ends_with(affix)) return value;
  return text(all.substr(is_prefix ? affix.size() : 0, all.size() - affix.size()));
}

constexpr Function kMethods[] = {
    {"strip", "chars", [](auto& v, auto& a) { return strip_method(v, a, true, true); }},
    {"lstrip", "chars", [](auto& v, auto& a) { return strip_method(v, a, true, false); }},
    {"rstrip", "chars", [](auto& v, auto& a) { return strip_method(v, a, false, true); }},
    {"split", "sep maxsplit", [](auto& v, auto& a) { return split_method(v, a, false); }},
    {"rsplit", "sep maxsplit", [](auto& v, auto& a) { return split_method(v, a, true); }},
    {"splitlines", "keepends",
     [](auto& v, auto& a) { return make_strings(split_lines(text_of(v), flag(a[0], false))); }},
    {"partition", "sep!", [](auto& v, auto& a) { return partition(v, a, false); }},
    {"rpartition", "sep!", [](auto& v, auto& a) { return partition(v, a, true); }},
    {"startswith", "prefix! start end", [](auto& v, auto& a) { return affix(v, a, true); }},
    {"endswith", "suffix! start end", [](auto& v, auto& a) { return affix(v, a, false); }},
    {"find", "sub! start end", [](auto& v, auto& a) { return Value(Json(position(v, a, false))); }},
    {"rfind", "sub! start end", [](auto& v, auto& a) { return Value(Json(position(v, a, true))); }},
    {"index", "sub! start end", [](auto& v, auto& a) { return required_position(v, a, false); }},
    {"rindex", "sub! start end", [](auto& v, auto& a) { return required_position(v, a, true); }},
    {"count", "sub! start end", count},
    {"join", "iterable!", join_method},
    {"upper", "", [](auto& v, auto&) { return text(upper(text_of(v))); }},
    {"lower", "", [](auto& v, auto&) { return text(lower(text_of(v))); }},
    {"casefold", "", [](auto& v, auto&) { return text(casefold(text_of(v))); }},
    {"title", "", [](auto& v, auto&) { return text(title(text_of(v))); }},
    {"capitalize", "", [](auto& v, auto&) { return text(capitalize(text_of(v))); }},
    {"swapcase", "", [](auto& v, auto&) { return text(swap_case(text_of(v))); }},
    {"replace", "old! new! count",
     [](auto& v, auto& a) {
       return text(replace(text_of(v), a[0].string("replace"), a[1].string("replace"),
                           integer(a[2], -1, "count")));
     }},
    {"removeprefix", "prefix!", [](auto& v, auto& a) { return remove_affix(v, a, true); }},
    {"removesuffix", "suffix!", [](auto& v, auto& a) { return remove_affix(v, a, false); }},
    {"ljust", "width! fillchar", [](auto& v, auto& a) { return pad_method(v, a, false, true); }},
    {"rjust", "width! fillchar", [](auto& v, auto& a) { return pad_method(v, a, true, false); }},
    {"center", "width! fillchar", [](auto& v, auto& a) { return pad_method(v, a, true, true); }},
    {"zfill", "width!", zfill},
    {"isdigit", "", [](auto& v, auto&) { return are_all(v, Letters::isdigit); }},
    {"isdecimal", "", [](auto& v, auto&) { return are_all(v, Letters::isdecimal); }},
    {"isnumeric", "", [](auto& v, auto&) { return are_all(v, Letters::isnumeric); }},
    {"isalpha", "", [](auto& v, auto&) { return are_all(v, Letters::isalpha); }},
    {"isalnum", "", [](auto& v, auto&) { return are_all(v, Letters::isalnum); }},
    {"isspace", "",
     [](auto& v, auto&) {
       const std::string& all = text_of(v);
       return Value(Json(!all.empty() && leading_space(all) == all.size()));
     }},
    {"isupper", "", [](auto& v, auto&) { return Value(Json(has_case(text_of(v), true))); }},
    {"islower", "", [](auto& v, auto&) { return Value(Json(has_case(text_of(v), false))); }},
};

}  // namespace

std::span<const Function> string_methods() {
  return kMethods;
}

std::string replace(const std::string& text, const std::string& from, const std::string& to,
                    int64_t count) {
  std::string result;
  if (from.empty()) {
    for (const std::string& each : characters(text)) {
      if (count != 0) result += to, --count;
      result += each;
      check_text(result.size());
    }
    return count != 0 ? result + to : result;
  }
  size_t at = 0;
  for (size_t found; count != 0 && (found = text.find(from, at)) != std::string::npos;
       at = found + from.size(), --count) {
    result.append(text, at, found - at).append(to);
    check_text(result.size());
  }
  return result.append(text, at);
}

std::vector<std::string> split_lines(std::string_view text, bool keeps_ends) {
  std::vector<std::string> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = line_end_bytes(text.substr(at));
    at += std::max<size_t>(end, 1);
    if (end == 0) continue;
    lines.emplace_back(text.substr(begin, at - begin - (keeps_ends ? 0 : end)));
    begin = at;
  }
  if (begin < text.size()) lines.emplace_back(text.substr(begin));
  return lines;
}

std::vector<std::string> split(std::string_view text, const std::string* separator, int64_t max,
                               bool from_end) {
  if (!separator) return split_blank(text, max, from_end);
  if (separator->empty()) fail("split '': expected at least one character");
  std::vector<std::string> all;
  for (; max != 0; --max) {
    const size_t at = from_end ? text.rfind(*separator) : text.find(*separator);
    if (at == std::string_view::npos) break;
    const size_t after = at + separator->size();
    all.emplace_back(from_end ? text.substr(after) : text.substr(0, at));
    text = from_end ? text.substr(0, at) : text.substr(after);
  }
  all.emplace_back(text);
  if (from_end) std::ranges::reverse(all);
  return all;
}

Value make_strings(const std::vector<std::string>& strings) {
  return {Json(strings)};
}

int64_t count_characters(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (uint8_t(c) & 0xc0) != 0x80; });
}

std::string pad(const std::string& text, int64_t width, const std::string& fill, bool left,
                bool right) {
  if (width > kMaxWidth) fail(fmt::format("width {}: expected at most {}", width, kMaxWidth));
  const int64_t missing = std::max<int64_t>(0, width - count_characters(text));
  // CPython's centering: the odd space is on the left if the width is odd.
  const int64_t before = left && right ? missing / 2 + (missing & width & 1) : left ? missing : 0;
  std::string result;
  for (int64_t i = 0; i < before; ++i) result += fill;
  result += text;
  for (int64_t i = before; i < missing; ++i) result += fill;
  return result;
}

}  // namespace tandem::jinja
