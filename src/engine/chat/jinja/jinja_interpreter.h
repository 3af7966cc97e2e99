// Runs the tree of a template: statements in jinja_run.cc, expressions in jinja_evaluate.cc, calls
// in jinja_call.cc.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/chat/jinja/jinja_arguments.h"
#include "engine/chat/jinja/syntax/jinja_syntax.h"

namespace tandem::jinja {

using Scope = std::map<std::string, Value>;

/// State of a macro or of the variable `loop` beyond its value.
struct Frame {
  std::vector<Scope> scopes = {};  ///< of a macro: variables around it that are not global
  const Node* node = nullptr;      ///< of a loop
  size_t index = 0;
  int depth = 0;
  std::optional<std::vector<Value>> changed = {};  ///< last arguments of loop.changed
};

constexpr size_t kElementBytes = 64;  ///< that an element of a list counts

enum class Flow : uint8_t { next, leave, skip };  // skip: to the next element of a loop

class Interpreter {
 public:
  explicit Interpreter(Scope variables);
  std::string run(const Node& root);
  int line() const { return line_; }

 private:
  /// Statements and expressions that run, in one another: bounds the stack.
  struct Level {
    explicit Level(int& count);
    ~Level() { --levels; }
    int& levels;
  };

  // Limits of work and memory.
  void count_step(const Node& node);
  void count_steps(size_t steps);
  /// Counts a look-up of one of the value's elements.
  void count_elements(const Value& value);
  /// Counts work on all of a value.
  void count_work(const Value& value);
  /// Counts an element that is copied towards the limit.
  const Json& counted(const Json& json);
  /// Counts a string towards the limit.
  Value checked(Value value);
  /// A string that an operator made.
  Value text_value(std::string text);
  /// A list or dictionary that the template made.
  static Value nested(Json json);

  // Statements.
  Flow execute(const Node& node);
  void write(const Value& value);
  std::string capture(const Node& body);
  void assign(const Node& target, const Value& value);
  /// Runs a loop over a value, `depth` loops of a recursive one around it.
  void loop(const Node& node, const Value& looped, int depth);
  static Value loop_value(const Node& node, const std::vector<Value>& all, size_t i, int depth);
  Flow run_with(const Node& node);
  Value look_up(const std::string& name) const;

  // Expressions.
  Value evaluate(const Node& node);
  Value list(const Node& node);
  Value dictionary(const Node& node);
  Value item(const Value& object, const Value& index);
  Value slice(const Node& node, const Value& object);
  static Value unary(const std::string& op, const Value& value);
  Value binary(const Node& node);
  Value multiply(const Value& sequence, const Value& count);

  // Calls. `caller`: of a call block, or nullptr.
  Arguments arguments(const Node& node);
  Value call(const Node& node, const Value* caller = nullptr);
  Value call_function(const std::string& name, const Arguments& given);
  Value call_loop(const std::string& name, Frame& frame, const Arguments& given);
  Value call_macro(const Value& macro, const Arguments& given, const Value* caller);
  void bind_macro(const Node& macro, const Arguments& given, const Value* caller);
  /// A macro, or the body of a call, that sees the variables around it.
  Value make_macro(const Node& node) const;

  std::vector<Scope> scopes_;
  size_t first_scope_ = 0;  ///< of the macro that runs; the global scope 0 is below
  std::string output_;
  Value filtered_;  ///< text of the block that a filter changes
  int64_t steps_ = 0;
  size_t made_ = 0;
  int calls_ = 0, levels_ = 0, line_ = 0;
};

}  // namespace tandem::jinja
