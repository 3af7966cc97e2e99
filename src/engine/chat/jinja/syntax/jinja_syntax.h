// Templates of chats as a tree: the part of Jinja2 that published templates use, with the options
// that transformers sets (trim_blocks, lstrip_blocks).
//
// A target of an assignment is a name, an attribute of a name (a namespace), or a list of targets.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/chat/jinja/jinja_value.h"

namespace tandem::jinja {

enum class Kind : uint8_t {
  // statements
  text,     ///< value
  output,   ///< children: the expression
  for_,     ///< text: "recursive" or ""; children: target, list, condition or nothing, body, else
  if_,      ///< children: condition, body, else
  set,      ///< children: target, value
  macro,    ///< text: name; names: parameters; children: body, then defaults of the last parameters
  block,    ///< children; text of a template's: "generation" if it has that tag
  capture,  ///< children: target, body, value with `filtered` in it
  call_block,    ///< children: the call, a macro of the body
  filter_block,  ///< children: body, value with `filtered` in it
  with,          ///< names; children: their values, body
  break_,
  continue_,
  // expressions
  constant,   ///< value
  name,       ///< text
  filtered,   ///< text of the block that a filter changes
  list,       ///< text: "tuple" or ""; children
  dict,       ///< children: key, value, key, value …
  attribute,  ///< text; children: the object
  item,       ///< children: the object, the index
  slice,      ///< children: the object, begin, end, step, each or nothing
  call,       ///< children: the function, arguments; names: "", the keyword, "*" or "**" of each
              ///< argument
  filter,     ///< text: name; children: the value, arguments; names as in call
  test,       ///< text: name; children: the value, arguments
  unary,      ///< text: "not", "-" or "+"
  binary,     ///< text: the operator; children: two
  condition,  ///< children: value if true, condition, else or nothing
  nothing,
};

struct Node {
  Kind kind = Kind::nothing;
  std::string text = {};
  std::vector<std::string> names = {};
  std::vector<std::unique_ptr<Node>> children = {};
  Value value = {};
  int line = 0;
  bool uses_caller = false, uses_positional = false, uses_keywords = false;  ///< of a macro
  int height = 1;  ///< levels of the expression
};

/// Characters that a template writes around what {% generation %} marks: of no text (Unicode has
/// none there).
constexpr std::string_view kGenerationBegin = "\U0010FFFE", kGenerationEnd = "\U0010FFFF";

/// Throws ConfigError naming the line and what is not understood.
std::unique_ptr<Node> parse(std::string_view source);

}  // namespace tandem::jinja
