#include "engine/chat/jinja_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "core/printable.h"
#include "engine/chat/jinja_functions.h"

namespace tandem::jinja {
namespace {

constexpr int64_t kMaxSteps = 3'000'000;
constexpr size_t kElementBytes = 64;  // that an element of a list counts
constexpr int kMaxCalls = 50, kMaxDepth = 150;
constexpr int kMaxLevels = 1500;  // of expressions and statements in one another
// Bytes of a string that one step may search for a character, or change, and elements that it may
// look at.
constexpr size_t kBytesOfAStep = 256, kChangedBytesOfAStep = 64, kElementsOfAStep = 8;

enum class Flow : uint8_t { next, leave, skip };  // skip: to the next element of a loop

class Interpreter {
 public:
  explicit Interpreter(std::map<std::string, Value> variables) {
    for (const Node& each : functions()) variables[each.text].macro = &each;
    scopes_.push_back(std::move(variables));
  }

  std::string run(const Node& root) {
    execute(root);
    return std::move(output_);
  }

 private:
  using Scope = std::map<std::string, Value>;

  /// Functions of every template.
  static const std::vector<Node>& functions() {
    static const std::vector<Node> kFunctions = [] {
      std::vector<Node> all;
      for (const char* name : {"raise_exception", "namespace", "dict", "range", "strftime_now"}) {
        all.push_back({.kind = Kind::name, .text = name});
      }
      return all;
    }();
    return kFunctions;
  }

  /// Statements and expressions that run, in one another: bounds the stack.
  struct Level {
    explicit Level(int& count) : levels(count) {
      if (++levels > kMaxLevels) fail(fmt::format("more than {} levels", kMaxLevels));
    }
    ~Level() { --levels; }
    int& levels;
  };

  Flow execute(const Node& node) {
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
        loop(node);
        break;
      case Kind::set:
        assign(node, evaluate(*node.children[0]));
        break;
      case Kind::capture:
        scopes_.back()[node.names[0]] = Value(Json(capture(*node.children[0])));
        break;
      case Kind::macro: {
        Value macro;
        macro.macro = &node;
        scopes_.back()[node.text] = macro;
        break;
      }
      case Kind::break_:
        return Flow::leave;
      case Kind::continue_:
        return Flow::skip;
      case Kind::constant:
      case Kind::name:
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

  void count_step(const Node& node) {
    line_ = node.line;
    count_steps(1);
  }
  void count_steps(size_t steps) {
    if ((steps_ += int64_t(steps)) > kMaxSteps) fail("more steps than a chat needs");
  }
  /// Counts a look-up of one of the value's elements.
  void count_elements(const Value& value) {
    if (value.data && value.data->is_structured()) {
      count_steps(value.data->size() / kElementsOfAStep);
    }
  }
  /// Counts work on all of a value.
  void count_work(const Value& value) {
    if (value.is_string()) return count_steps(value.string("").size() / kChangedBytesOfAStep);
    if (!value.data || !value.data->is_structured()) return;
    size_t all = value.data->size();
    for (const Json& each : *value.data) all += each.is_structured() ? each.size() : 0;
    count_steps(all / kElementsOfAStep);
  }
  /// A string that an operator made.
  Value text_value(std::string text) {
    check_text(made_ += text.size());
    return {Json(std::move(text))};
  }
  void write(const Value& value) {
    const std::string text = to_text(value);
    check_text(output_.size() + text.size());
    output_ += text;
  }
  std::string capture(const Node& body) {
    std::string before = std::exchange(output_, {});
    execute(body);
    return std::exchange(output_, std::move(before));
  }

  void assign(const Node& node, Value value) {
    if (node.names.size() == 1) {
      scopes_.back()[node.names[0]] = std::move(value);
      return;
    }
    const Value space = look_up(node.names[0]);
    if (!space.space) fail(fmt::format("'{}' is not a namespace", printable(node.names[0])));
    if (value.data) {
      (*space.space)[node.names[1]] = *nested(*value.data).data;
    } else {
      space.space->erase(node.names[1]);
    }
  }

  void loop(const Node& node) {
    const Value looped = evaluate(*node.children[0]);
    count_work(looped);
    std::vector<Value> all = elements(looped);
    scopes_.emplace_back();
    if (node.children[1]->kind != Kind::nothing) {
      std::erase_if(all, [&](const Value& each) {
        bind(node, each);
        return !is_true(evaluate(*node.children[1]));
      });
    }
    for (size_t i = 0; i < all.size(); ++i) {
      scopes_.back().clear();
      bind(node, all[i]);
      scopes_.back()["loop"] = loop_value(all, i);
      if (execute(*node.children[2]) == Flow::leave) break;
    }
    scopes_.pop_back();
    if (all.empty()) execute(*node.children[3]);
  }
  void bind(const Node& node, const Value& element) {
    if (node.names.size() == 1) {
      scopes_.back()[node.names[0]] = element;
      return;
    }
    const std::vector<Value> each = elements(element);
    if (each.size() != node.names.size()) {
      fail(fmt::format("{} values for {} names", each.size(), node.names.size()));
    }
    for (size_t i = 0; i < each.size(); ++i) scopes_.back()[node.names[i]] = each[i];
  }
  static Value loop_value(const std::vector<Value>& all, size_t i) {
    Json loop{{"index", i + 1},
              {"index0", i},
              {"first", i == 0},
              {"last", i + 1 == all.size()},
              {"length", all.size()},
              {"revindex", all.size() - i},
              {"revindex0", all.size() - i - 1}};
    if (i > 0) loop["previtem"] = *all[i - 1].data;
    if (i + 1 < all.size()) loop["nextitem"] = *all[i + 1].data;
    return {std::move(loop)};
  }

  Value look_up(const std::string& name) const {
    for (size_t i = scopes_.size(); i-- > first_scope_;) {
      const auto found = scopes_[i].find(name);
      if (found != scopes_[i].end()) return found->second;
    }
    const auto found = scopes_[0].find(name);
    return found == scopes_[0].end() ? Value() : found->second;
  }

  Value evaluate(const Node& node) {
    const Level level(levels_);
    count_step(node);
    const auto child = [&](size_t i) { return evaluate(*node.children[i]); };
    switch (node.kind) {
      case Kind::constant:
        return node.value;
      case Kind::name:
        return look_up(node.text);
      case Kind::list: {
        Json list = Json::array();
        for (size_t i = 0; i < node.children.size(); ++i) {
          list.push_back(counted(child(i).json("element")));
        }
        return nested(std::move(list));
      }
      case Kind::dict: {
        Json dict = Json::object();
        for (size_t i = 0; i + 1 < node.children.size(); i += 2) {
          dict[child(i).string("key")] = counted(child(i + 1).json("element"));
        }
        return nested(std::move(dict));
      }
      case Kind::attribute: {
        const Value object = child(0);
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
      case Kind::break_:
      case Kind::continue_:
      case Kind::nothing:
        break;
    }
    return {};
  }

  /// Counts an element that is copied towards the limit.
  const Json& counted(const Json& json) {
    made_ += kElementBytes;
    if (json.is_string()) made_ += json.get_ref<const std::string&>().size();
    if (made_ > kMaxText) fail("lists of too many elements");
    if (json.is_structured()) std::ranges::for_each(json, [this](auto& each) { counted(each); });
    return json;
  }
  /// A list or dictionary that the template made.
  static Value nested(Json json) {
    if (!fits_depth(json, kMaxDepth)) {
      fail(fmt::format("lists and dictionaries nested deeper than {}", kMaxDepth));
    }
    return {std::move(json)};
  }
  static bool fits_depth(const Json& json, int depth) {
    if (!json.is_structured()) return true;
    return depth > 0 &&
           std::ranges::all_of(json, [&](const Json& each) { return fits_depth(each, depth - 1); });
  }

  /// Counts a string towards the limit.
  Value checked(Value value) {
    if (value.is_string()) check_text(made_ += value.string("").size());
    return value;
  }

  Value item(const Value& object, const Value& index) {
    count_elements(object.is_dict() ? object : Value());
    if (object.space || object.is_dict() || !object.is_defined()) {
      if (object.is_defined() && !index.is_string()) return {};
      return attribute(object, to_text(index));
    }
    if (!object.is_list() && !object.is_string()) return {};
    if (object.is_string()) count_steps(object.string("").size() / kBytesOfAStep);
    return element_at(object, index.integer("index"));
  }

  Value slice(const Node& node, const Value& object) {
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
    std::string text;
    for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
      object.is_string() ? void(text += to_text(all[size_t(i)]))
                         : list.push_back(*all[size_t(i)].data);
    }
    return object.is_string() ? text_value(std::move(text)) : Value(std::move(list));
  }

  Arguments arguments(const Node& node) {
    Arguments all;
    for (size_t i = 0; i < node.names.size(); ++i) {
      Value value = evaluate(*node.children[i + 1]);
      if (node.names[i].empty()) {
        all.positional.push_back(std::move(value));
      } else {
        all.keywords.emplace_back(node.names[i], std::move(value));
      }
    }
    return all;
  }

  Value call(const Node& node) {
    const Node& function = *node.children[0];
    if (function.kind == Kind::attribute) {
      const Value object = evaluate(*function.children[0]);
      count_work(object);
      return checked(call_method(function.text, object, arguments(node)));
    }
    const Value value = evaluate(function);
    if (!value.macro) {
      fail(fmt::format("a call of '{}', which is no function", printable(function.text)));
    }
    const Arguments given = arguments(node);
    if (value.macro->kind == Kind::macro) return call_macro(*value.macro, given);
    const std::string& name = value.macro->text;
    if (name == "raise_exception") {
      fail(fmt::format("the template refuses the messages: {}",
                       printable(to_text(given.get(0, "message")))));
    }
    if (name == "namespace" || name == "dict") {
      Json attributes = Json::object();
      for (const auto& [key, each] : given.keywords) {
        if (each.data) attributes[key] = counted(*each.data);
      }
      const Value dict = nested(std::move(attributes));
      if (name == "dict") return dict;
      Value space;
      space.space = std::make_shared<Json>(*dict.data);
      return space;
    }
    if (name == "range") return range(given);
    return now(given.get(0, "format").string("strftime_now"));
  }

  Value call_macro(const Node& macro, const Arguments& given) {
    if (++calls_ > kMaxCalls) fail(fmt::format("more than {} calls in one another", kMaxCalls));
    Scope scope;
    const size_t num_defaults = macro.children.size() - 1;
    for (size_t i = 0; i < macro.names.size(); ++i) {
      Value value = given.get(i, macro.names[i]);
      const size_t from_end = macro.names.size() - i;
      if (!value.is_defined() && from_end <= num_defaults) {
        value = evaluate(*macro.children[1 + num_defaults - from_end]);
      }
      scope[macro.names[i]] = value;
    }
    scopes_.push_back(std::move(scope));
    const size_t before = std::exchange(first_scope_, scopes_.size() - 1);
    std::string text = capture(*macro.children[0]);
    first_scope_ = before;
    scopes_.pop_back();
    --calls_;
    return text_value(std::move(text));
  }

  static Value unary(const std::string& op, const Value& value) {
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

  Value binary(const Node& node) {
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
    if (op == "+" && a.is_list() && b.is_list()) {
      Json list = *a.data;
      made_ += kElementBytes * (list.size() + b.data->size());
      if (made_ > kMaxText) fail("lists of too many elements");
      for (const Json& each : *b.data) list.push_back(each);
      return {std::move(list)};
    }
    if (op == "*" && a.is_string() && (b.is_int() || b.is_bool())) {
      return repeat(a.string(""), b.integer(""));
    }
    return arithmetic(op, a, b);
  }

  Value repeat(const std::string& text, int64_t count) {
    if (count <= 0 || text.empty()) return {Json("")};
    if (text.size() > kMaxText / size_t(count)) fail("a string repeated too often");
    std::string all;
    for (int64_t i = 0; i < count; ++i) all += text;
    return text_value(std::move(all));
  }

 public:
  int line() const { return line_; }

 private:
  std::vector<Scope> scopes_;
  size_t first_scope_ = 0;  ///< of the macro that runs; the global scope 0 is below
  std::string output_;
  int64_t steps_ = 0;
  size_t made_ = 0;
  int calls_ = 0, levels_ = 0, line_ = 0;
};

}  // namespace

std::string run(const Node& root, std::map<std::string, Value> variables) {
  Interpreter interpreter(std::move(variables));
  try {
    return interpreter.run(root);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("line {}: {}", interpreter.line(), error.what()));
  }
}

}  // namespace tandem::jinja
