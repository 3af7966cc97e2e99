#include "engine/chat/jinja/jinja_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/system/printable.h"
#include "engine/chat/jinja/jinja_interpreter.h"

namespace tandem::jinja {
namespace {

constexpr int64_t kMaxSteps = 3'000'000;
constexpr int kMaxDepth = 150;
constexpr int kMaxLevels = 1500;  // of expressions and statements in one another
// Bytes of a string that one step may change, and elements that it may look at.
constexpr size_t kChangedBytesOfAStep = 64, kElementsOfAStep = 8;

/// Functions of every template.
const std::vector<Node>& functions() {
  static const std::vector<Node> kFunctions = [] {
    std::vector<Node> all;
    for (const char* name : {"raise_exception", "namespace", "dict", "range", "strftime_now"}) {
      all.push_back({.kind = Kind::name, .text = name});
    }
    return all;
  }();
  return kFunctions;
}

bool fits_depth(const Json& json, int depth) {
  if (!json.is_structured()) return true;
  return depth > 0 &&
         std::ranges::all_of(json, [&](const Json& each) { return fits_depth(each, depth - 1); });
}

}  // namespace

Interpreter::Level::Level(int& count) : levels(count) {
  if (++levels > kMaxLevels) fail(fmt::format("more than {} levels", kMaxLevels));
}

Interpreter::Interpreter(Scope variables) {
  for (const Node& each : functions()) variables[each.text].macro = &each;
  scopes_.push_back(std::move(variables));
}

std::string Interpreter::run(const Node& root) {
  execute(root);
  return std::move(output_);
}

void Interpreter::count_step(const Node& node) {
  line_ = node.line;
  count_steps(1);
}

void Interpreter::count_steps(size_t steps) {
  if ((steps_ += int64_t(steps)) > kMaxSteps) fail("more steps than a chat needs");
}

void Interpreter::count_elements(const Value& value) {
  if (value.data && value.data->is_structured()) {
    count_steps(value.data->size() / kElementsOfAStep);
  }
}

void Interpreter::count_work(const Value& value) {
  if (value.is_string()) return count_steps(value.string("").size() / kChangedBytesOfAStep);
  if (!value.data || !value.data->is_structured()) return;
  size_t all = value.data->size();
  for (const Json& each : *value.data) all += each.is_structured() ? each.size() : 0;
  count_steps(all / kElementsOfAStep);
}
const Json& Interpreter::counted(const Json& json) {
  made_ += kElementBytes;
  if (json.is_string()) made_ += json.get_ref<const std::string&>().size();
  if (made_ > kMaxText) fail("lists of too many elements");
  if (json.is_structured()) std::ranges::for_each(json, [this](auto& each) { counted(each); });
  return json;
}
Value Interpreter::checked(Value value) {
  if (value.is_string()) check_text(made_ += value.string("").size());
  return value;
}

Value Interpreter::text_value(std::string text) {
  check_text(made_ += text.size());
  return {Json(std::move(text))};
}

Value Interpreter::nested(Json json) {
  if (!fits_depth(json, kMaxDepth)) {
    fail(fmt::format("lists and dictionaries nested deeper than {}", kMaxDepth));
  }
  return {std::move(json)};
}

Flow Interpreter::execute(const Node& node) {
  const Level level(levels_);
  count_step(node);
  switch (node.kind) {
    case Kind::text:
      write(node.value);
      break;
    case Kind::output:
      write(evaluate(*node.children[0]));
      break;
    case Kind::block:
      for (const auto& child : node.children) {
        const Flow flow = execute(*child);
        if (flow != Flow::next) return flow;
      }
      break;
    case Kind::if_: {
      const bool holds = is_true(evaluate(*node.children[0]));
      return execute(*node.children[holds ? 1 : 2]);
    }
    case Kind::for_:
      loop(node, evaluate(*node.children[1]), 0);
      break;
    case Kind::set:
      assign(*node.children[0], evaluate(*node.children[1]));
      break;
    case Kind::capture: {
      filtered_ = Value(Json(capture(*node.children[1])));
      assign(*node.children[0], evaluate(*node.children[2]));
      break;
    }
    case Kind::filter_block:
      filtered_ = Value(Json(capture(*node.children[0])));
      write(evaluate(*node.children[1]));
      break;
    case Kind::macro:
      scopes_.back()[node.text] = make_macro(node);
      break;
    case Kind::call_block: {
      const Value caller = make_macro(*node.children[1]);
      write(call(*node.children[0], &caller));
      break;
    }
    case Kind::with:
      return run_with(node);
    case Kind::break_:
      return Flow::leave;
    case Kind::continue_:
      return Flow::skip;
    case Kind::constant:
    case Kind::name:
    case Kind::filtered:
    case Kind::list:
    case Kind::dict:
    case Kind::attribute:
    case Kind::item:
    case Kind::slice:
    case Kind::call:
    case Kind::filter:
    case Kind::test:
    case Kind::unary:
    case Kind::binary:
    case Kind::condition:
    case Kind::nothing:
      break;
  }
  return Flow::next;
}

void Interpreter::write(const Value& value) {
  const std::string text = to_text(value);
  check_text(output_.size() + text.size());
  output_ += text;
}

std::string Interpreter::capture(const Node& body) {
  std::string before = std::exchange(output_, {});
  execute(body);
  return std::exchange(output_, std::move(before));
}

void Interpreter::assign(const Node& target, const Value& value) {
  if (target.kind == Kind::name) {
    scopes_.back()[target.text] = value;
    return;
  }
  if (target.kind == Kind::list) {
    const std::vector<Value> each = elements(value);
    if (each.size() != target.children.size()) {
      fail(fmt::format("{} values for {} names", each.size(), target.children.size()));
    }
    for (size_t i = 0; i < each.size(); ++i) assign(*target.children[i], each[i]);
    return;
  }
  const std::string& name = target.children[0]->text;
  const Value space = look_up(name);
  if (!space.space) fail(fmt::format("'{}' is not a namespace", printable(name)));
  if (value.data) {
    (*space.space)[target.text] = *nested(*value.data).data;
  } else {
    space.space->erase(target.text);
  }
}

Flow Interpreter::run_with(const Node& node) {
  Scope scope;
  for (size_t i = 0; i < node.names.size(); ++i) scope[node.names[i]] = evaluate(*node.children[i]);
  scopes_.push_back(std::move(scope));
  const Flow flow = execute(*node.children.back());
  scopes_.pop_back();
  return flow;
}

void Interpreter::loop(const Node& node, const Value& looped, int depth) {
  count_work(looped);
  std::vector<Value> all = elements(looped);
  scopes_.emplace_back();
  if (node.children[2]->kind != Kind::nothing) {
    std::erase_if(all, [&](const Value& each) {
      assign(*node.children[0], each);
      return !is_true(evaluate(*node.children[2]));
    });
  }
  std::optional<std::vector<Value>> changed;
  for (size_t i = 0; i < all.size(); ++i) {
    scopes_.back().clear();
    assign(*node.children[0], all[i]);
    const Value value = loop_value(node, all, i, depth);
    value.frame->changed = std::move(changed);
    scopes_.back()["loop"] = value;
    const Flow flow = execute(*node.children[3]);
    changed = std::move(value.frame->changed);
    if (flow == Flow::leave) break;
  }
  scopes_.pop_back();
  if (all.empty()) execute(*node.children[4]);
}

Value Interpreter::loop_value(const Node& node, const std::vector<Value>& all, size_t i,
                              int depth) {
  Json loop{{"index", i + 1},
            {"index0", i},
            {"first", i == 0},
            {"last", i + 1 == all.size()},
            {"length", all.size()},
            {"depth", depth + 1},
            {"depth0", depth},
            {"revindex", all.size() - i},
            {"revindex0", all.size() - i - 1}};
  if (i > 0) loop["previtem"] = *all[i - 1].data;
  if (i + 1 < all.size()) loop["nextitem"] = *all[i + 1].data;
  Value value(std::move(loop));
  value.frame = std::make_shared<Frame>();
  value.frame->node = &node;
  value.frame->index = i;
  value.frame->depth = depth;
  return value;
}

Value Interpreter::look_up(const std::string& name) const {
  for (size_t i = scopes_.size(); i-- > first_scope_;) {
    const auto found = scopes_[i].find(name);
    if (found != scopes_[i].end()) return found->second;
  }
  const auto found = scopes_[0].find(name);
  return found == scopes_[0].end() ? Value() : found->second;
}

std::string run(const Node& root, std::map<std::string, Value> variables) {
  Interpreter interpreter(std::move(variables));
  try {
    return interpreter.run(root);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("line {}: {}", interpreter.line(), error.what()));
  }
}

}  // namespace tandem::jinja
