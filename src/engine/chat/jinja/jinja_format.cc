#include "engine/chat/jinja/jinja_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "core/system/printable.h"
#include "engine/chat/jinja/jinja_case.h"
#include "engine/chat/jinja/jinja_functions.h"
#include "engine/chat/jinja/jinja_text.h"

namespace tandem::jinja {
namespace {

constexpr int64_t kMaxFieldWidth = 10'000, kMaxPrecision = 1000;
constexpr int kDefaultPrecision = 6;

/// Format of one value.
struct Spec {
  std::string fill = " ";
  char align = 0;  ///< '<', '>', '^', '='; 0: as the type has it
  char sign = 0;   ///< '+', '-' or ' '; 0: as '-'
  bool is_alternate = false, pads_zeros = false;
  char grouping = 0;  ///< ',' or '_'
  int64_t width = 0, precision = -1;
  char type = 0;
};

[[noreturn]] void refuse_value(const std::string& field, const Value& value) {
  fail(fmt::format("{}: {}: expected a value of its type", printable(field),
                   printable(to_text(value))));
}

std::string align_text(const Spec& spec, const std::string& text, char otherwise) {
  const char align = spec.align == 0 ? otherwise : spec.align;
  const int64_t missing = std::max<int64_t>(0, spec.width - count_characters(text));
  const int64_t before = align == '>' ? missing : align == '^' ? missing / 2 : 0;
  std::string padded;
  for (int64_t i = 0; i < before; ++i) padded += spec.fill;
  padded += text;
  for (int64_t i = before; i < missing; ++i) padded += spec.fill;
  return padded;
}

/// `sign` and `digits`, with what pads between them.
std::string align_number(const Spec& spec, const std::string& sign, const std::string& digits) {
  const bool is_between = spec.align == '=' || (spec.align == 0 && spec.pads_zeros);
  if (!is_between) return align_text(spec, sign + digits, '>');
  Spec inner = spec;
  inner.align = '>';
  inner.width = std::max<int64_t>(0, spec.width - int64_t(sign.size()));
  if (spec.pads_zeros) inner.fill = "0";
  return sign + align_text(inner, digits, '>');
}

/// Puts a separator between groups of digits before the point.
std::string group(const Spec& spec, std::string digits, int size) {
  if (spec.grouping == 0) return digits;
  if (spec.fill == "0" && (spec.pads_zeros || spec.align == '=')) {
    fail("a format of grouped digits filled with zeros");
  }
  size_t end = 0;
  while (end < digits.size() && std::isxdigit(static_cast<unsigned char>(digits[end])) != 0 &&
         (size == 4 || std::isdigit(static_cast<unsigned char>(digits[end])) != 0)) {
    ++end;
  }
  for (auto at = int64_t(end) - size; at > 0; at -= size) {
    digits.insert(size_t(at), 1, spec.grouping);
  }
  return digits;
}

std::string make_sign(const Spec& spec, bool is_negative) {
  return is_negative ? "-" : spec.sign == 0 || spec.sign == '-' ? "" : std::string(1, spec.sign);
}

/// Digits of a size, without sign and groups.
std::string format_size(const Spec& spec, double size, const std::string& field) {
  const bool has_no_type = spec.type == 0;
  const auto kind = char(std::tolower(static_cast<unsigned char>(spec.type)));
  const auto precision = int(spec.precision < 0 ? kDefaultPrecision : spec.precision);
  if (spec.is_alternate && kind != 'e' && kind != 'f') fail(fmt::format("{}: #", printable(field)));
  if (has_no_type && spec.precision >= 0) {
    fail(fmt::format("{}: a precision without a type", printable(field)));
  }
  const bool has_percent = spec.type == '%';
  if (!std::isfinite(size)) {
    return std::string(std::isnan(size) ? "nan" : "inf") + (has_percent ? "%" : "");
  }
  if (has_no_type) return python_text(Json(size));
  if (has_percent) return fmt::format("{:.{}f}%", size * 100, precision);
  if (kind == 'g') return fmt::format("{:.{}g}", size, std::max(1, precision));
  if (kind == 'e') {
    return spec.is_alternate ? fmt::format("{:#.{}e}", size, precision)
                             : fmt::format("{:.{}e}", size, precision);
  }
  if (kind != 'f') refuse_value(field, Value(Json(size)));
  return spec.is_alternate ? fmt::format("{:#.{}f}", size, precision)
                           : fmt::format("{:.{}f}", size, precision);
}

std::string format_double(const Spec& spec, double value, const std::string& field) {
  const std::string sign = make_sign(spec, std::signbit(value) && !std::isnan(value));
  const std::string text = format_size(spec, std::fabs(value), field);
  const bool is_upper = std::isupper(static_cast<unsigned char>(spec.type)) != 0;
  return align_number(spec, sign, group(spec, is_upper ? upper(text) : text, 3));
}

std::string format_integer(const Spec& spec, int64_t value, const std::string& field) {
  const uint64_t size = value < 0 ? -uint64_t(value) : uint64_t(value);
  std::string digits, prefix;
  const bool has_threes = spec.type == 0 || spec.type == 'd';
  if (has_threes) digits = fmt::format("{}", size);
  if (spec.type == 'x') digits = fmt::format("{:x}", size), prefix = "0x";
  if (spec.type == 'X') digits = fmt::format("{:X}", size), prefix = "0X";
  if (spec.type == 'o') digits = fmt::format("{:o}", size), prefix = "0o";
  if (spec.type == 'b') digits = fmt::format("{:b}", size), prefix = "0b";
  if (digits.empty()) {
    if (std::string_view("eEfFgG%").find(spec.type) == std::string_view::npos) {
      refuse_value(field, Value(Json(value)));
    }
    return format_double(spec, double(value), field);
  }
  if (!has_threes && spec.grouping == ',') fail(fmt::format("{}: a comma", printable(field)));
  for (auto i = int64_t(digits.size()); i < spec.precision; ++i) digits.insert(0, "0");
  const std::string sign = make_sign(spec, value < 0) + (spec.is_alternate ? prefix : "");
  return align_number(spec, sign, group(spec, digits, has_threes ? 3 : 4));
}

std::string cut(const std::string& text, int64_t max) {
  if (max < 0) return text;
  std::string result;
  for (const std::string& each : characters(text)) {
    if (max-- == 0) break;
    result += each;
  }
  return result;
}

/// Python's format(value, spec).
std::string format_value(const Spec& spec, bool is_empty, const Value& value,
                         const std::string& field) {
  if (value.space || value.macro) refuse_value(field, value);
  if (is_empty) return to_text(value);
  if (value.is_string()) {
    const bool fits = (spec.type == 0 || spec.type == 's') && spec.align != '=' && spec.sign == 0 &&
                      !spec.is_alternate && spec.grouping == 0;
    if (!fits) refuse_value(field, value);
    return align_text(spec, cut(value.string(""), spec.precision), '<');
  }
  if (value.is_int() || value.is_bool()) {
    const bool is_whole =
        spec.type == 0 || std::string_view("dxXob").find(spec.type) != std::string_view::npos;
    if (is_whole && spec.precision >= 0) refuse_value(field, value);
    return format_integer(spec, value.integer(""), field);
  }
  if (!value.is_number()) refuse_value(field, value);
  return format_double(spec, value.number(), field);
}

/// Reads what conversions and formats are made of.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}
  bool is_end() const { return at_ == text_.size(); }
  char peek() const { return is_end() ? '\0' : text_[at_]; }
  char take() {
    if (is_end()) fail(fmt::format("format {}: it ends within a field", printable(text_)));
    return text_[at_++];
  }
  bool accept(char c) { return peek() == c && !is_end() && (++at_, true); }
  /// One character of UTF-8.
  std::string_view take_character() {
    const size_t bytes = characters(text_.substr(at_, 4))[0].size();
    at_ += bytes;
    return text_.substr(at_ - bytes, bytes);
  }
  size_t at() const { return at_; }
  std::string_view since(size_t begin) const { return text_.substr(begin, at_ - begin); }
  /// A number, or `absent` where no digit is next.
  int64_t number(int64_t absent, int64_t max) {
    if (std::isdigit(static_cast<unsigned char>(peek())) == 0) return absent;
    int64_t value = 0;
    while (std::isdigit(static_cast<unsigned char>(peek())) != 0) {
      value = value * 10 + (take() - '0');
      if (value > max) fail(fmt::format("format {}: expected at most {}", printable(text_), max));
    }
    return value;
  }

 private:
  std::string_view text_;
  size_t at_ = 0;
};

bool is_one_of(char c, std::string_view all) {
  return c != '\0' && all.find(c) != std::string_view::npos;
}

Spec parse_spec(const std::string& text) {
  Reader reader(text);
  Spec spec;
  const std::string_view align = "<>=^";
  const std::string first = text.empty() ? "" : characters(text)[0];
  const bool has_fill = first.size() < text.size() && is_one_of(text[first.size()], align);
  if (has_fill) spec.fill = reader.take_character();
  if (is_one_of(reader.peek(), align)) spec.align = reader.take();
  if (is_one_of(reader.peek(), "+- ")) spec.sign = reader.take();
  spec.is_alternate = reader.accept('#');
  if (!has_fill && reader.accept('0')) {
    spec.pads_zeros = spec.align == 0;
    spec.fill = "0";
  }
  spec.width = reader.number(0, kMaxFieldWidth);
  if (is_one_of(reader.peek(), ",_")) spec.grouping = reader.take();
  if (reader.accept('.')) {
    spec.precision = reader.number(-1, kMaxPrecision);
    if (spec.precision < 0) fail(fmt::format("format {}: no precision", printable(text)));
  }
  if (!reader.is_end()) spec.type = reader.take();
  const bool is_known = spec.type == 0 || is_one_of(spec.type, "sdboxXeEfFgG%");
  if (!is_known || !reader.is_end()) {
    fail(fmt::format("format {}: expected a type of s, d, b, o, x, X, e, f, g or %",
                     printable(text)));
  }
  return spec;
}

/// Values of `format % values`.
class PercentFormatter {
 public:
  PercentFormatter(const std::string& format, const Value& values)
      : reader_(format), values_(values) {
    if (values.is_tuple()) all_ = elements(values);
    if (!values.is_tuple()) all_ = {values};
  }

  std::string run() {
    std::string text;
    while (!reader_.is_end()) {
      const char c = reader_.take();
      text += c != '%' ? std::string(1, c) : convert();
      check_text(text.size());
    }
    const bool is_list = values_.is_list() && kind_of(*values_.data) == SequenceKind::list;
    const bool may_have_more = is_list || values_.is_dict() || !values_.is_defined();
    if (next_ < all_.size() && !may_have_more) fail("%: more values than conversions");
    return text;
  }

 private:
  Value take_value() {
    if (next_ == all_.size()) fail("%: fewer values than conversions");
    return all_[next_++];
  }

  int64_t take_width(int64_t absent, int64_t max) {
    if (!reader_.accept('*')) return reader_.number(absent, max);
    const int64_t width = take_value().integer("*");
    if (width > max || width < -max) fail(fmt::format("*: {}: expected at most {}", width, max));
    return width;
  }

  std::string convert() {
    const size_t begin = reader_.at();
    std::optional<std::string> name;
    if (reader_.accept('(')) {
      const size_t first = reader_.at();
      for (int depth = 1; depth > 0;) {
        const char c = reader_.take();
        depth += c == '(' ? 1 : c == ')' ? -1 : 0;
      }
      name = std::string(reader_.since(first));
      name->pop_back();
    }
    Spec spec;
    bool is_left = false;
    for (; is_one_of(reader_.peek(), "-+ #0");) {
      const char flag = reader_.take();
      is_left |= flag == '-';
      spec.is_alternate |= flag == '#';
      spec.pads_zeros |= flag == '0';
      if (flag == '+' || (flag == ' ' && spec.sign != '+')) spec.sign = flag;
    }
    spec.width = take_width(0, kMaxFieldWidth);
    if (spec.width < 0) is_left = true, spec.width = -spec.width;
    if (reader_.accept('.')) spec.precision = std::max<int64_t>(0, take_width(0, kMaxPrecision));
    while (is_one_of(reader_.peek(), "hlL")) reader_.take();
    spec.type = reader_.take();
    if (is_left) spec.align = '<', spec.pads_zeros = false;
    const std::string field = "%" + std::string(reader_.since(begin));
    if (spec.type == '%' && reader_.at() == begin + 1) return "%";
    return convert(spec, name ? named(*name, field) : take_value(), field);
  }

  Value named(const std::string& name, const std::string& field) {
    if (!values_.is_dict()) fail(printable(field) + ": expected a dictionary of values");
    next_ = all_.size();
    const auto found = values_.data->find(name);
    if (found == values_.data->end()) fail(printable(field) + ": no such value");
    return {values_, *found};
  }

  static std::string convert(Spec spec, const Value& value, const std::string& field) {
    if (value.space || value.macro) refuse_value(field, value);
    if (spec.type == 's' || spec.type == 'r') {
      const std::string text = spec.type == 's'     ? to_text(value)
                               : value.is_defined() ? python_text(*value.data)
                                                    : "Undefined";
      return align_text(spec, cut(text, spec.precision), '>');
    }
    if (spec.type == 'c') {
      if (!value.is_string() || count_characters(value.string("")) != 1) refuse_value(field, value);
      return align_text(spec, value.string(""), '>');
    }
    if (is_one_of(spec.type, "eEfFgG")) {
      if (!value.is_numeric()) refuse_value(field, value);
      return format_double(spec, value.number(), field);
    }
    if (!is_one_of(spec.type, "diuxXo"))
      fail(printable(field) + ": a conversion that is not known");
    if (is_one_of(spec.type, "iu")) spec.type = 'd';
    const bool is_whole = value.is_int() || value.is_bool();
    if (is_whole) return format_integer(spec, value.integer(""), field);
    if (spec.type != 'd' || !value.is_number() || !(std::fabs(value.number()) < 0x1p63)) {
      refuse_value(field, value);
    }
    return format_integer(spec, int64_t(value.number()), field);
  }

  Reader reader_;
  const Value& values_;
  std::vector<Value> all_;
  size_t next_ = 0;
};

/// Fields of `format.format(…)`.
class FieldFormatter {
 public:
  explicit FieldFormatter(const Arguments& arguments) : arguments_(arguments) {}

  std::string run(std::string_view format, bool is_nested) {
    Reader reader(format);
    std::string text;
    while (!reader.is_end()) {
      const char c = reader.take();
      if (c == '}' && !reader.accept('}')) fail("format: a single '}'");
      text += c != '{' || reader.accept('{') ? std::string(1, c) : field(reader, is_nested);
      check_text(text.size());
    }
    return text;
  }

 private:
  std::string field(Reader& reader, bool is_nested) {
    if (is_nested) ++depth_;
    if (depth_ > 1) fail("format: a field in the format of another's format");
    const size_t begin = reader.at();
    const auto skip_to = [&](std::string_view ends) {
      const size_t first = reader.at();
      while (!is_one_of(reader.peek(), ends)) reader.take();
      return std::string(reader.since(first));
    };
    const std::string name = skip_to("!:}");
    char conversion = 0;
    if (reader.accept('!')) conversion = reader.take();
    std::string spec;
    if (reader.accept(':')) {
      const size_t first = reader.at();
      for (int depth = 0; depth > 0 || reader.peek() != '}';) {
        const char c = reader.take();
        depth += c == '{' ? 1 : c == '}' ? -1 : 0;
      }
      spec = std::string(reader.since(first));
    }
    if (!reader.accept('}')) fail("format: a field without '}'");
    const std::string whole = "{" + std::string(reader.since(begin));
    Value value = find(name, whole);
    spec = run(spec, true);
    if (is_nested) --depth_;
    if (conversion == 'r') {
      value = Value(Json(value.is_defined() ? python_text(value.json(whole)) : "Undefined"));
    } else if (conversion == 's') {
      value = Value(Json(to_text(value)));
    } else if (conversion != 0) {
      fail(printable(whole) + ": expected !r or !s");
    }
    return format_value(parse_spec(spec), spec.empty(), value, whole);
  }

  /// Value of "", "0" or "name", then ".attribute" and "[element]" of it.
  Value find(const std::string& name, const std::string& field) {
    const size_t end = std::min(name.find_first_of(".["), name.size());
    Value value = find_argument(name.substr(0, end), field);
    for (size_t at = end; at < name.size();) {
      const bool is_attribute = name[at] == '.';
      if (!is_attribute && name[at] != '[') fail(printable(field) + ": expected . or [");
      const size_t stop = is_attribute ? std::min(name.find_first_of(".[", at + 1), name.size())
                                       : name.find(']', at);
      if (stop == std::string::npos) fail(printable(field) + ": no ]");
      const std::string key = name.substr(at + 1, stop - at - 1);
      if (key.empty()) fail(printable(field) + ": an empty name");
      const bool is_index = !is_attribute && std::ranges::all_of(key, is_digit);
      value = is_index && (value.is_list() || value.is_string())
                  ? element_at(value, index(key, field))
                  : attribute(value, key);
      at = stop + (is_attribute ? 0 : 1);
    }
    return value;
  }

  static bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }
  static int64_t index(const std::string& digits, const std::string& field) {
    if (digits.size() > 9) fail(printable(field) + ": a number out of range");
    return std::stoll(digits);
  }

  Value find_argument(const std::string& name, const std::string& field) {
    if (!std::ranges::all_of(name, is_digit)) {
      const auto found =
          std::ranges::find(arguments_.keywords, name, [](const auto& each) { return each.first; });
      if (found == arguments_.keywords.end()) fail(printable(field) + ": no such value");
      return found->second;
    }
    const bool is_manual = !name.empty();
    if (is_manual ? next_ > 0 : next_ < 0) fail("format: numbered fields next to others");
    const int64_t at = is_manual ? index(name, field) : next_;
    next_ = is_manual ? -1 : next_ + 1;
    if (at >= int64_t(arguments_.positional.size())) fail(printable(field) + ": no such value");
    return arguments_.positional[size_t(at)];
  }

  const Arguments& arguments_;
  int64_t next_ = 0;  ///< argument of the next field without a number; -1: fields have numbers
  int depth_ = 0;
};

}  // namespace

std::string format_percent(const std::string& format, const Value& values) {
  return PercentFormatter(format, values).run();
}

std::string format_fields(const std::string& format, const Arguments& arguments) {
  return FieldFormatter(arguments).run(format, false);
}

}  // namespace tandem::jinja
