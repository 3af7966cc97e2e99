#include "engine/chat/jinja/jinja_lists.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "engine/chat/jinja/jinja_case.h"
#include "engine/chat/jinja/jinja_functions.h"
#include "engine/chat/jinja/jinja_text.h"

namespace tandem::jinja {
namespace {

constexpr size_t kMaxUnique = 5'000;  // each is compared with all before it

/// Strings in lower case, unless case matters.
Value comparable(const Value& value, bool is_case_sensitive) {
  if (is_case_sensitive || !value.is_string()) return value;
  return {Json(lower(value.string("")))};
}

/// Values to compare elements by: of attributes, "a,b" if there may be several, or the element.
std::vector<Value> keys_of(const Value& element, const Value& attributes, bool is_case_sensitive,
                           bool are_several) {
  if (!attributes.is_defined() || attributes.is_none()) {
    return {comparable(element, is_case_sensitive)};
  }
  if (!attributes.is_string() || !are_several) {
    return {comparable(path_attribute(element, attributes), is_case_sensitive)};
  }
  std::vector<Value> keys;
  const std::string comma = ",";
  for (const std::string& name : split(attributes.string(""), &comma, -1, false)) {
    keys.push_back(comparable(path_attribute(element, Value(Json(name))), is_case_sensitive));
  }
  return keys;
}

bool are_less(const std::vector<Value>& a, const std::vector<Value>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!equals(a[i], b[i])) return is_less(a[i], b[i]);
  }
  // A comparison of one value also refuses those that have no order.
  return a.size() == 1 && !a[0].is_list() && is_less(a[0], b[0]);
}

struct Keyed {
  std::vector<Value> keys;
  Value value;
};

std::vector<Keyed> keyed(const Value& value, const Value& attributes, bool is_case_sensitive,
                         bool are_several = false) {
  std::vector<Keyed> all;
  for (const Value& each : elements(value)) {
    all.push_back({keys_of(each, attributes, is_case_sensitive, are_several), each});
  }
  return all;
}

Value sorted(std::vector<Keyed> all, bool is_reverse) {
  std::ranges::stable_sort(all, [&](const Keyed& a, const Keyed& b) {
    return is_reverse ? are_less(b.keys, a.keys) : are_less(a.keys, b.keys);
  });
  std::vector<Value> values;
  for (const Keyed& each : all) values.push_back(each.value);
  return make_list(values);
}

}  // namespace

Value make_list(const std::vector<Value>& values) {
  Json list = Json::array();
  for (const Value& each : values) list.push_back(each.json("element"));
  return {std::move(list)};
}

Value pairs(const Value& dictionary) {
  Json list = Json::array();
  if (!dictionary.is_defined()) return {std::move(list)};
  for (const auto& [key, each] : dictionary.data->items()) {
    list.push_back(make_sequence(Json::array({key, each}), SequenceKind::tuple));
  }
  return {std::move(list)};
}

Value path_attribute(const Value& value, const Value& path) {
  if (path.is_int())
    return value.is_list() || value.is_string() ? element_at(value, path.integer("")) : Value();
  Value found = value;
  const std::string dot = ".";
  for (const std::string& name : split(path.string("attribute"), &dot, -1, false)) {
    int64_t index = 0;
    const char* const end = name.data() + name.size();
    const bool is_index = std::from_chars(name.data(), end, index).ptr == end && !name.empty();
    if (is_index && (found.is_list() || found.is_string())) {
      found = element_at(found, index);
    } else {
      found = attribute(found, name);
    }
  }
  return found;
}

Value batch(const Value& value, const Bound& a) {
  const int64_t count = a[0].integer("linecount");
  if (count < 1) fail("batch: expected at least 1");
  Json all = Json::array();
  for (const Value& each : elements(value)) {
    if (all.empty() || int64_t(all.back().size()) == count) all.push_back(Json::array());
    all.back().push_back(each.json("element"));
  }
  while (!all.empty() && a[1].is_defined() && !a[1].is_none() &&
         int64_t(all.back().size()) < count) {
    all.back().push_back(*a[1].data);
  }
  return {std::move(all)};
}

Value divide(const Value& value, const Bound& a) {
  const int64_t count = a[0].integer("slices");
  if (count < 1 || count > 1000) fail("slice: expected 1 to 1000 slices");
  const std::vector<Value> each = elements(value);
  const int64_t size = int64_t(each.size()) / count, longer = int64_t(each.size()) % count;
  Json all = Json::array();
  size_t at = 0;
  for (int64_t i = 0; i < count; ++i) {
    Json slice = Json::array();
    for (int64_t k = 0; k < size + (i < longer ? 1 : 0); ++k) slice.push_back(*each[at++].data);
    const bool is_filled = a[1].is_defined() && !a[1].is_none() && i >= longer;
    if (is_filled) slice.push_back(*a[1].data);
    all.push_back(std::move(slice));
  }
  return {std::move(all)};
}

Value dictsort(const Value& value, const Bound& a) {
  if (!value.is_dict()) fail("dictsort: expected a dictionary");
  const std::string by = a[1].is_defined() ? a[1].string("by") : "key";
  if (by != "key" && by != "value") fail("dictsort: expected by='key' or by='value'");
  return sorted(keyed(pairs(value), Value(Json(by == "key" ? 0 : 1)), flag(a[0], false)),
                flag(a[2], false));
}

Value extreme(const Value& value, const Bound& a, bool is_max) {
  const std::vector<Keyed> all = keyed(value, a[1], flag(a[0], false));
  if (all.empty()) return {};
  size_t best = 0;
  for (size_t i = 1; i < all.size(); ++i) {
    const bool is_better =
        is_max ? are_less(all[best].keys, all[i].keys) : are_less(all[i].keys, all[best].keys);
    if (is_better) best = i;
  }
  return all[best].value;
}

Value groupby(const Value& value, const Bound& a) {
  const bool is_case_sensitive = flag(a[2], false);
  const auto with_default = [&](const Value& found) {
    return found.is_defined() || !a[1].is_defined() ? found : a[1];
  };
  std::vector<Keyed> all;
  for (const Value& each : elements(value)) {
    const Value key = with_default(path_attribute(each, a[0]));
    all.push_back({{comparable(key, is_case_sensitive)}, each});
  }
  std::ranges::stable_sort(all, are_less, &Keyed::keys);
  Json groups = Json::array();
  for (size_t i = 0; i < all.size(); ++i) {
    if (i == 0 || !equals(all[i - 1].keys[0], all[i].keys[0])) {
      const Value key = with_default(path_attribute(all[i].value, a[0]));
      groups.push_back(
          make_sequence(Json::array({key.json("groupby"), Json::array()}), SequenceKind::group));
    }
    groups.back()[1].push_back(all[i].value.json("element"));
  }
  return {std::move(groups)};
}

Value join(const Value& value, const Bound& a) {
  std::string text;
  bool is_first = true;
  const bool has_attribute = a[1].is_defined() && !a[1].is_none();
  for (const Value& each : elements(value)) {
    if (!std::exchange(is_first, false)) text += to_text(a[0]);
    text += to_text(has_attribute ? path_attribute(each, a[1]) : each);
    check_text(text.size());
  }
  return {Json(text)};
}

Value sort(const Value& value, const Bound& a) {
  return sorted(keyed(value, a[2], flag(a[1], false), true), flag(a[0], false));
}

Value sum(const Value& value, const Bound& a) {
  const bool has_attribute = a[0].is_defined() && !a[0].is_none();
  Value total = a[1].is_defined() ? a[1] : Value(Json(0));
  for (const Value& each : elements(value)) {
    total = arithmetic("+", total, has_attribute ? path_attribute(each, a[0]) : each);
  }
  return total;
}

Value unique(const Value& value, const Bound& a) {
  std::vector<Keyed> seen;
  for (Keyed& each : keyed(value, a[1], flag(a[0], false))) {
    const bool is_new = std::ranges::none_of(
        seen, [&](const Keyed& other) { return equals(other.keys[0], each.keys[0]); });
    if (is_new) seen.push_back(std::move(each));
    if (seen.size() > kMaxUnique) fail(fmt::format("unique: more than {} values", kMaxUnique));
  }
  std::vector<Value> values;
  for (const Keyed& each : seen) values.push_back(each.value);
  return make_list(values);
}

}  // namespace tandem::jinja
