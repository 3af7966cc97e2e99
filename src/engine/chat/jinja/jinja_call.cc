// Calls of templates: macros, functions, methods, and what loops are asked.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/system/printable.h"
#include "engine/chat/jinja/jinja_functions.h"
#include "engine/chat/jinja/jinja_interpreter.h"

namespace tandem::jinja {
namespace {

constexpr int kMaxCalls = 50;

}  // namespace

Arguments Interpreter::arguments(const Node& node) {
  Arguments all;
  const auto add = [&](const std::string& name, Value value) {
    for (const auto& [known, other] : all.keywords) {
      if (known == name) fail(fmt::format("{}: given twice", printable(name)));
    }
    all.keywords.emplace_back(name, std::move(value));
  };
  for (size_t i = 0; i < node.names.size(); ++i) {
    Value value = evaluate(*node.children[i + 1]);
    if (node.names[i] == "*") {
      for (const Value& each : elements(value)) all.positional.emplace_back(counted(*each.data));
    } else if (node.names[i] == "**") {
      if (!value.is_dict()) fail("an argument after **: expected a dictionary");
      for (const auto& each : value.data->items()) {
        add(each.key(), Value(counted(each.value())));
      }
    } else if (node.names[i].empty()) {
      all.positional.push_back(std::move(value));
    } else {
      add(node.names[i], std::move(value));
    }
  }
  return all;
}

Value Interpreter::call(const Node& node, const Value* caller) {
  const Node& function = *node.children[0];
  if (function.kind == Kind::attribute) {
    const Value object = evaluate(*function.children[0]);
    const Value member = object.space ? attribute(object, function.text) : Value();
    if (object.frame && object.data)
      return call_loop(function.text, *object.frame, arguments(node));
    if (caller) fail(fmt::format("call of '{}': expected a macro", printable(function.text)));
    count_work(object);
    return checked(call_method(function.text, object, arguments(node)));
  }
  const Value value = evaluate(function);
  const Arguments given = arguments(node);
  if (value.frame && value.data) return call_loop("loop", *value.frame, given);
  if (!value.macro) {
    fail(fmt::format("a call of '{}', which is no function", printable(function.text)));
  }
  if (value.macro->kind == Kind::macro) return call_macro(value, given, caller);
  if (caller) fail(fmt::format("call of '{}': expected a macro", printable(function.text)));
  return call_function(value.macro->text, given);
}

Value Interpreter::call_function(const std::string& name, const Arguments& given) {
  if (name == "raise_exception") {
    const Bound a = bind_arguments(name, "message!", given);
    fail(fmt::format("the template refuses the messages: {}", printable(to_text(a[0]))));
  }
  if (name == "range") return range(given);
  if (name == "strftime_now") return now(bind_arguments(name, "format!", given)[0].string(name));
  if (name == "method") fail("a call of a method that is no attribute");
  // namespace and dict
  Json attributes = Json::object();
  if (given.positional.size() > 1) fail(name + ": expected at most one dictionary");
  for (const Value& each : given.positional) {
    if (!each.is_dict()) fail(name + ": expected a dictionary");
    attributes = counted(*each.data);
  }
  for (const auto& [key, each] : given.keywords) {
    if (each.data) attributes[key] = counted(*each.data);
  }
  const Value dict = nested(std::move(attributes));
  if (name == "dict") return dict;
  Value space;
  space.space = std::make_shared<Json>(*dict.data);
  return space;
}

Value Interpreter::call_loop(const std::string& name, Frame& frame, const Arguments& given) {
  if (name == "loop") {
    const Value looped = bind_arguments(name, "iterable!", given)[0];
    if (frame.node->text != "recursive") fail("loop(…): expected a loop that is recursive");
    std::string before = std::exchange(output_, {});
    loop(*frame.node, looped, frame.depth + 1);
    return text_value(std::exchange(output_, std::move(before)));
  }
  if (!given.keywords.empty()) fail(fmt::format("loop.{}: expected no keywords", printable(name)));
  if (name == "cycle") {
    if (given.positional.empty()) fail("loop.cycle: expected at least one value");
    return given.positional[frame.index % given.positional.size()];
  }
  if (name != "changed") fail(fmt::format("method '{}' is not known", printable(name)));
  const auto same = [](const Value& a, const Value& b) { return equals(a, b); };
  const bool is_same = frame.changed && std::ranges::equal(*frame.changed, given.positional, same);
  if (!is_same) frame.changed = given.positional;
  return {Json(!is_same)};
}

void Interpreter::bind_macro(const Node& macro, const Arguments& given, const Value* caller) {
  Scope& scope = scopes_.back();
  const size_t count = macro.names.size(), num_defaults = macro.children.size() - 1;
  std::vector<std::pair<std::string, Value>> keywords = given.keywords;
  for (size_t i = 0; i < count; ++i) {
    const std::string& name = macro.names[i];
    const auto keyword = std::ranges::find(keywords, name, [](auto& each) { return each.first; });
    const size_t from_end = count - i;
    if (i < given.positional.size()) {
      scope[name] = given.positional[i];
    } else if (keyword != keywords.end()) {
      scope[name] = keyword->second;
      keywords.erase(keyword);
    } else if (from_end <= num_defaults) {
      scope[name] = evaluate(*macro.children[1 + num_defaults - from_end]);
    } else {
      scope[name] = Value();
    }
  }
  const auto refuse = [&](const std::string& what) {
    fail(fmt::format("macro '{}': {}", printable(macro.text), what));
  };
  if (caller && !macro.uses_caller) refuse("a call block, which it does not use");
  if (macro.uses_caller && !scope.contains("caller")) scope["caller"] = caller ? *caller : Value();
  if (macro.uses_keywords) {
    Json all = Json::object();
    for (const auto& [name, value] : keywords) all[name] = counted(value.json("kwargs"));
    scope["kwargs"] = nested(std::move(all));
  } else if (!keywords.empty()) {
    refuse(fmt::format("no parameter {}", printable(keywords[0].first)));
  }
  if (macro.uses_positional) {
    Json all = Json::array();
    for (size_t i = count; i < given.positional.size(); ++i) {
      all.push_back(counted(given.positional[i].json("varargs")));
    }
    scope["varargs"] = nested(make_sequence(std::move(all), SequenceKind::tuple));
  } else if (given.positional.size() > count) {
    refuse(fmt::format("{} arguments: expected at most {}", given.positional.size(), count));
  }
}

Value Interpreter::call_macro(const Value& macro, const Arguments& given, const Value* caller) {
  if (++calls_ > kMaxCalls) fail(fmt::format("more than {} calls in one another", kMaxCalls));
  const size_t size = scopes_.size();
  const size_t before = std::exchange(first_scope_, size);
  if (macro.frame) {
    scopes_.insert(scopes_.end(), macro.frame->scopes.begin(), macro.frame->scopes.end());
  }
  scopes_.emplace_back();
  bind_macro(*macro.macro, given, caller);
  std::string text = capture(*macro.macro->children[0]);
  first_scope_ = before;
  scopes_.resize(size);
  --calls_;
  return text_value(std::move(text));
}

Value Interpreter::make_macro(const Node& node) const {
  Value macro;
  macro.macro = &node;
  const size_t begin = std::max<size_t>(1, first_scope_);
  if (scopes_.size() > begin) {
    macro.frame = std::make_shared<Frame>();
    macro.frame->scopes.assign(scopes_.begin() + int64_t(begin), scopes_.end());
  }
  return macro;
}

}  // namespace tandem::jinja
