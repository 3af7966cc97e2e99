// Parses statements of templates.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/system/printable.h"
#include "engine/chat/jinja/syntax/jinja_expressions.h"

namespace tandem::jinja {
namespace {

class Parser : public ExpressionParser {
 public:
  explicit Parser(std::string_view source) : ExpressionParser(source) {}

  NodePtr run() {
    NodePtr body = parse_body({});
    if (peek().type != Type::end) refuse();
    if (has_marks_) body->text = "generation";
    return body;
  }

 private:
  /// Statements up to a tag that begins with one of `ends`, whose name is the next token then.
  NodePtr parse_body(const std::vector<std::string_view>& ends) {
    const Nesting nesting(*this);
    NodePtr body = make(Kind::block);
    while (peek().type != Type::end) {
      if (peek().type == Type::text) {
        body->children.push_back(make(Kind::text));
        body->children.back()->value = Value(Json(take().text));
      } else if (peek().type == Type::output_begin) {
        take();
        body->children.push_back(make_with(Kind::output, "", parse_tuple()));
        if (peek().type != Type::output_end) refuse();
        take();
      } else {
        take();  // block_begin
        if (std::ranges::find(ends, peek().text) != ends.end()) return body;
        body->children.push_back(parse_statement());
      }
    }
    if (!ends.empty()) {
      fail(fmt::format("line {}: the template ends without '{}'", peek().line, ends.back()));
    }
    return body;
  }

  NodePtr parse_statement() {
    const int line = peek().line;
    const std::string name = take_name();
    if (name == "for") return parse_for();
    if (name == "if") return parse_if();
    if (name == "set") return parse_set();
    if (name == "macro") return parse_macro(take_name(), "endmacro");
    if (name == "call") return parse_call_block();
    if (name == "filter") return parse_filter_block();
    if (name == "with") return parse_with();
    if (name == "break" || name == "continue") {
      end_block();
      return make(name == "break" ? Kind::break_ : Kind::continue_);
    }
    if (name == "generation") {  // marks what an assistant wrote
      end_block();
      NodePtr body = parse_body({"endgeneration"});
      take(), end_block();
      const auto mark = [this](std::string_view text) {
        return make_with(Kind::output, "", constant(std::string(text)));
      };
      has_marks_ = true;
      body->children.insert(body->children.begin(), mark(kGenerationBegin));
      body->children.push_back(mark(kGenerationEnd));
      return body;
    }
    fail(fmt::format(
        "line {}: tag '{}': expected for, if, set, macro, call, filter, with, break or continue",
        line, printable(name)));
  }

  NodePtr parse_for() {
    NodePtr node = make(Kind::for_);
    node->children.push_back(parse_target(false));
    expect_name("in");
    node->children.push_back(parse_items_of_loop());
    node->children.push_back(accept_name("if") ? parse_expression() : make(Kind::nothing));
    if (accept_name("recursive")) node->text = "recursive";
    end_block();
    node->children.push_back(parse_body({"else", "endfor"}));
    if (accept_name("else")) {
      end_block();
      node->children.push_back(parse_body({"endfor"}));
    } else {
      node->children.push_back(make(Kind::nothing));
    }
    take(), end_block();
    return node;
  }

  /// After "if" or "elif".
  NodePtr parse_if() {
    const Nesting nesting(*this);
    NodePtr node = make_with(Kind::if_, "", parse_tuple());
    end_block();
    node->children.push_back(parse_body({"elif", "else", "endif"}));
    if (accept_name("elif")) {
      node->children.push_back(parse_if());
      return node;
    }
    if (accept_name("else")) {
      end_block();
      node->children.push_back(parse_body({"endif"}));
    } else {
      node->children.push_back(make(Kind::nothing));
    }
    take(), end_block();
    return node;
  }

  /// Targets with commas between them, or one.
  NodePtr parse_target(bool has_attributes) {
    const Nesting nesting(*this);
    NodePtr first = parse_single_target(has_attributes);
    if (!is_op(",")) return first;
    NodePtr list = make_with(Kind::list, "", std::move(first));
    while (accept_op(",") && !is_op("=") && !is_name("in")) {
      list->children.push_back(parse_single_target(has_attributes));
    }
    return list;
  }
  NodePtr parse_single_target(bool has_attributes) {
    if (accept_op("(")) {
      NodePtr inner = parse_target(has_attributes);
      expect_op(")");
      return inner;
    }
    NodePtr target = make(Kind::name, take_name());
    if (!has_attributes || !accept_op(".")) return target;
    return make_with(Kind::attribute, take_name(), std::move(target));
  }

  NodePtr parse_set() {
    NodePtr node = make(Kind::set);
    node->children.push_back(parse_target(true));
    if (accept_op("=")) {
      node->children.push_back(parse_tuple());
      end_block();
      return node;
    }
    node->kind = Kind::capture;
    if (node->children[0]->kind == Kind::list) refuse();
    NodePtr value = parse_filters(make(Kind::filtered));
    end_block();
    node->children.push_back(parse_body({"endset"}));
    node->children.push_back(std::move(value));
    take(), end_block();
    return node;
  }

  NodePtr parse_filter_block() {
    NodePtr node = make(Kind::filter_block);
    NodePtr value = make_with(Kind::filter, take_name(), make(Kind::filtered));
    if (is_op("(")) parse_arguments(*value);
    value = parse_filters(std::move(value));
    end_block();
    node->children.push_back(parse_body({"endfilter"}));
    node->children.push_back(std::move(value));
    take(), end_block();
    return node;
  }

  NodePtr parse_with() {
    NodePtr node = make(Kind::with);
    while (peek().type != Type::block_end) {
      if (!node->names.empty()) expect_op(",");
      node->names.push_back(take_name());
      expect_op("=");
      node->children.push_back(parse_expression());
    }
    end_block();
    node->children.push_back(parse_body({"endwith"}));
    take(), end_block();
    return node;
  }

  NodePtr parse_call_block() {
    NodePtr node = make(Kind::call_block);
    std::vector<NodePtr> defaults;
    NodePtr body = make(Kind::macro, "caller");
    if (is_op("(")) defaults = parse_parameters(*body);
    node->children.push_back(parse_unary(false));
    if (node->children[0]->kind != Kind::call) refuse();
    parse_macro_body(*body, std::move(defaults), "endcall");
    node->children.push_back(std::move(body));
    end_block();
    return node;
  }

  NodePtr parse_macro(std::string name, std::string_view end) {
    NodePtr node = make(Kind::macro, std::move(name));
    std::vector<NodePtr> defaults = parse_parameters(*node);
    parse_macro_body(*node, std::move(defaults), end);
    if (peek().type == Type::name) take();  // its name again
    end_block();
    return node;
  }
  /// Returns the defaults of the last parameters.
  std::vector<NodePtr> parse_parameters(Node& macro) {
    std::vector<NodePtr> defaults;
    expect_op("(");
    while (!accept_op(")")) {
      if (!macro.names.empty()) expect_op(",");
      if (!macro.names.empty() && accept_op(")")) break;
      macro.names.push_back(take_name());
      if (accept_op("=")) {
        defaults.push_back(parse_expression());
      } else if (!defaults.empty()) {
        refuse();
      }
    }
    return defaults;
  }
  void parse_macro_body(Node& macro, std::vector<NodePtr> defaults, std::string_view end) {
    end_block();
    const Uses around = std::exchange(uses_, {});
    macro.children.push_back(parse_body({end}));
    for (NodePtr& each : defaults) macro.children.push_back(std::move(each));
    take();
    const auto is_parameter = [&](const char* name) {
      return std::ranges::find(macro.names, name) != macro.names.end();
    };
    macro.uses_caller = uses_.caller && !is_parameter("caller");
    macro.uses_positional = uses_.positional && !is_parameter("varargs");
    macro.uses_keywords = uses_.keywords && !is_parameter("kwargs");
    uses_.caller |= around.caller;
    uses_.positional |= around.positional;
    uses_.keywords |= around.keywords;
  }

  bool has_marks_ = false;
};

}  // namespace

std::unique_ptr<Node> parse(std::string_view source) {
  return Parser(source).run();
}

}  // namespace tandem::jinja
