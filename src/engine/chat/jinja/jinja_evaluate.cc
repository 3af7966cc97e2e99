// Expressions of templates.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/system/printable.h"
#include "engine/chat/jinja/jinja_format.h"
#include "engine/chat/jinja/jinja_functions.h"
#include "engine/chat/jinja/jinja_interpreter.h"

namespace tandem::jinja {
namespace {

/// Bytes of a string that one step may search for a character.
constexpr size_t kBytesOfAStep = 256;

/// A method of a dictionary that is not called: defined, and true.
Value method_value() {
  static const Node kMethod{.kind = Kind::name, .text = "method"};
  Value method;
  method.macro = &kMethod;
  return method;
}

}  // namespace

Value Interpreter::evaluate(const Node& node) {
  const Level level(levels_);
  count_step(node);
  const auto child = [&](size_t i) { return evaluate(*node.children[i]); };
  switch (node.kind) {
    case Kind::constant:
      return node.value;
    case Kind::name:
      return look_up(node.text);
    case Kind::filtered:
      return filtered_;
    case Kind::list:
      return list(node);
    case Kind::dict:
      return dictionary(node);
    case Kind::attribute: {
      const Value object = child(0);
      if (object.is_dict() && is_dict_attribute(node.text)) return method_value();
      count_elements(object);
      return attribute(object, node.text);
    }
    case Kind::item:
      return item(child(0), child(1));
    case Kind::slice:
      return slice(node, child(0));
    case Kind::call:
      return call(node);
    case Kind::filter: {
      const Value value = child(0);
      count_work(value);
      return checked(apply_filter(node.text, value, arguments(node)));
    }
    case Kind::test: {
      const Value value = child(0);
      const Arguments given = arguments(node);
      for (const Value& each : given.positional) count_work(each);
      return {Json(apply_test(node.text, value, given))};
    }
    case Kind::unary:
      return unary(node.text, child(0));
    case Kind::binary:
      return binary(node);
    case Kind::condition:
      return is_true(child(1)) ? child(0) : child(2);
    case Kind::text:
    case Kind::output:
    case Kind::for_:
    case Kind::if_:
    case Kind::set:
    case Kind::macro:
    case Kind::block:
    case Kind::capture:
    case Kind::call_block:
    case Kind::filter_block:
    case Kind::with:
    case Kind::break_:
    case Kind::continue_:
    case Kind::nothing:
      break;
  }
  return {};
}

Value Interpreter::list(const Node& node) {
  Json list = Json::array();
  for (const auto& child : node.children) {
    list.push_back(counted(evaluate(*child).json("element")));
  }
  if (!node.text.empty()) list = make_sequence(std::move(list), SequenceKind::tuple);
  return nested(std::move(list));
}

Value Interpreter::dictionary(const Node& node) {
  Json dict = Json::object();
  for (size_t i = 0; i + 1 < node.children.size(); i += 2) {
    const Value key = evaluate(*node.children[i]);
    dict[key.string("key")] = counted(evaluate(*node.children[i + 1]).json("element"));
  }
  return nested(std::move(dict));
}

Value Interpreter::item(const Value& object, const Value& index) {
  count_elements(object.is_dict() ? object : Value());
  if (object.space || object.is_dict() || !object.is_defined()) {
    if (object.is_defined() && !index.is_string()) return {};
    return attribute(object, to_text(index));
  }
  if (!object.is_list() && !object.is_string()) return {};
  if (object.is_string()) count_steps(object.string("").size() / kBytesOfAStep);
  return element_at(object, index.integer("index"));
}

Value Interpreter::slice(const Node& node, const Value& object) {
  if (!object.is_list() && !object.is_string()) fail("slice: expected a list or a string");
  count_work(object);
  const std::vector<Value> all = elements(object);
  const auto size = int64_t(all.size());
  const auto bound = [&](size_t child, int64_t absent) {
    const Value value = evaluate(*node.children[child]);
    return value.is_defined() && !value.is_none() ? value.integer("slice") : absent;
  };
  const int64_t step = std::clamp<int64_t>(bound(3, 1), -size - 1, size + 1);
  if (step == 0) fail("slice: expected a step other than 0");
  const auto clamp = [&](int64_t i) {
    if (i < 0) i = std::max(i, -size - 1) + size;
    return step > 0 ? std::clamp<int64_t>(i, 0, size) : std::clamp<int64_t>(i, -1, size - 1);
  };
  const bool has_begin = node.children[1]->kind != Kind::nothing;
  const bool has_end = node.children[2]->kind != Kind::nothing;
  const int64_t begin = has_begin ? clamp(bound(1, 0)) : step > 0 ? 0 : size - 1;
  const int64_t end = has_end ? clamp(bound(2, size)) : step > 0 ? size : -1;
  Json list = Json::array();
  if (object.is_tuple()) list = make_sequence(std::move(list), SequenceKind::tuple);
  std::string text;
  for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
    object.is_string() ? void(text += to_text(all[size_t(i)]))
                       : list.push_back(*all[size_t(i)].data);
  }
  return object.is_string() ? text_value(std::move(text)) : Value(std::move(list));
}

Value Interpreter::unary(const std::string& op, const Value& value) {
  if (op == "not") return {Json(!is_true(value))};
  if (value.is_int() || value.is_bool()) {
    const int64_t number = value.integer("");
    int64_t negated = 0;
    if (__builtin_sub_overflow(int64_t{0}, number, &negated)) fail("-: a number out of range");
    return {Json(op == "-" ? negated : number)};
  }
  if (!value.is_number()) fail(fmt::format("{}: expected a number", op));
  return {Json(op == "-" ? -value.data->get<double>() : value.data->get<double>())};
}

Value Interpreter::binary(const Node& node) {
  const std::string& op = node.text;
  Value a = evaluate(*node.children[0]);
  if (op == "and") return is_true(a) ? evaluate(*node.children[1]) : a;
  if (op == "or") return is_true(a) ? a : evaluate(*node.children[1]);
  const Value b = evaluate(*node.children[1]);
  if (op == "==" || op == "!=" || op.ends_with("in")) count_work(b);
  if (op == "==") return {Json(equals(a, b))};
  if (op == "!=") return {Json(!equals(a, b))};
  if (op == "<") return {Json(is_less(a, b))};
  if (op == ">") return {Json(is_less(b, a))};
  if (op == "<=") return {Json(!is_less(b, a))};
  if (op == ">=") return {Json(!is_less(a, b))};
  if (op == "in") return {Json(contains(b, a))};
  if (op == "not in") return {Json(!contains(b, a))};
  if (op == "~") return text_value(to_text(a) + to_text(b));
  if (op == "+" && a.is_string() && b.is_string()) {
    return text_value(a.string("") + b.string(""));
  }
  if (op == "%" && a.is_string()) return text_value(format_percent(a.string(""), b));
  if (op == "+" && a.is_list() && b.is_list() && a.is_tuple() == b.is_tuple()) {
    Json list = *a.data;
    made_ += kElementBytes * (list.size() + b.data->size());
    if (made_ > kMaxText) fail("lists of too many elements");
    for (const Json& each : *b.data) list.push_back(each);
    return {std::move(list)};
  }
  const auto is_sequence = [](const Value& value) { return value.is_string() || value.is_list(); };
  if (op == "*" && is_sequence(a)) return multiply(a, b);
  if (op == "*" && is_sequence(b)) return multiply(b, a);
  return arithmetic(op, a, b);
}

Value Interpreter::multiply(const Value& sequence, const Value& count) {
  const int64_t times = std::max<int64_t>(0, count.integer("*"));
  if (sequence.is_list()) {
    Json all = Json::array();
    if (sequence.is_tuple()) all = make_sequence(std::move(all), SequenceKind::tuple);
    for (int64_t i = 0; i < times && !sequence.data->empty(); ++i) {
      for (const Json& each : *sequence.data) all.push_back(counted(each));
    }
    return {std::move(all)};
  }
  const std::string& text = sequence.string("");
  if (times == 0 || text.empty()) return {Json("")};
  if (text.size() > kMaxText / size_t(times)) fail("a string repeated too often");
  std::string all;
  for (int64_t i = 0; i < times; ++i) all += text;
  return text_value(std::move(all));
}

}  // namespace tandem::jinja
