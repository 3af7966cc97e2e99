#include "engine/chat/jinja/syntax/jinja_expressions.h"

namespace tandem::jinja {
namespace {

constexpr const char* kTuple = "tuple";

}  // namespace

/// An expression, or a tuple of them without brackets.
NodePtr ExpressionParser::parse_tuple() {
  NodePtr first = parse_expression();
  if (!is_op(",")) return first;
  NodePtr list = make_with(Kind::list, kTuple, std::move(first));
  while (accept_op(",") && peek().type != Type::block_end && peek().type != Type::output_end) {
    list->children.push_back(parse_expression());
  }
  return list;
}

/// Value that a loop runs over: an expression without a condition, which filters, or a list of
/// them.
NodePtr ExpressionParser::parse_items_of_loop() {
  NodePtr first = parse_or();
  if (!is_op(",")) return first;
  NodePtr list = make_with(Kind::list, kTuple, std::move(first));
  while (accept_op(",")) list->children.push_back(parse_or());
  return list;
}

NodePtr ExpressionParser::parse_expression() {
  const Nesting nesting(*this);
  NodePtr value = parse_or();
  while (accept_name("if")) {
    NodePtr condition = parse_or();
    NodePtr otherwise = accept_name("else") ? parse_expression() : make(Kind::nothing);
    value = make_with(Kind::condition, "", std::move(value), std::move(condition),
                      std::move(otherwise));
  }
  return value;
}

NodePtr ExpressionParser::parse_or() {
  NodePtr left = parse_and();
  while (accept_name("or")) left = make_with(Kind::binary, "or", std::move(left), parse_and());
  return left;
}

NodePtr ExpressionParser::parse_and() {
  NodePtr left = parse_not();
  while (accept_name("and")) left = make_with(Kind::binary, "and", std::move(left), parse_not());
  return left;
}

NodePtr ExpressionParser::parse_not() {
  const Nesting nesting(*this);
  if (accept_name("not")) return make_with(Kind::unary, "not", parse_not());
  return parse_comparison();
}

NodePtr ExpressionParser::parse_comparison() {
  NodePtr left = parse_sum();
  std::string op;
  while (!(op = take_comparison()).empty()) {
    left = make_with(Kind::binary, op, std::move(left), parse_sum());
    if (!peek_comparison().empty() && op != "in" && op != "not in") refuse();  // a < b < c
  }
  return left;
}

std::string ExpressionParser::peek_comparison() const {
  for (const char* op : {"==", "!=", ">=", "<=", ">", "<"}) {
    if (is_op(op)) return op;
  }
  if (is_name("in")) return "in";
  return is_name("not") && peek(1).type == Type::name && peek(1).text == "in" ? "not in" : "";
}

std::string ExpressionParser::take_comparison() {
  const std::string op = peek_comparison();
  if (!op.empty()) take();
  if (op == "not in") take();
  return op;
}

NodePtr ExpressionParser::parse_sum() {
  return parse_left({"+", "-"}, [&] {
    return parse_left({"~"}, [&] {
      return parse_left({"*", "/", "//", "%"},
                        [&] { return parse_left({"**"}, [&] { return parse_unary(true); }); });
    });
  });
}

template <typename Operand>
NodePtr ExpressionParser::parse_left(std::initializer_list<std::string_view> ops,
                                     const Operand& operand) {
  NodePtr left = operand();
  while (peek().type == Type::op && std::ranges::find(ops, peek().text) != ops.end()) {
    const std::string op = take().text;
    left = make_with(Kind::binary, op, std::move(left), operand());
  }
  return left;
}

NodePtr ExpressionParser::parse_unary(bool has_filters) {
  const Nesting nesting(*this);
  NodePtr node;
  if (is_op("-") || is_op("+")) {
    const std::string op = take().text;
    node = make_with(Kind::unary, op, parse_unary(false));
  } else {
    node = parse_postfix(parse_primary());
  }
  return has_filters ? parse_filters(std::move(node)) : std::move(node);
}

NodePtr ExpressionParser::parse_primary() {
  const Token token = peek();
  if (token.type == Type::name) {
    take();
    const std::string& name = token.text;
    if (name == "true" || name == "True") return constant(true);
    if (name == "false" || name == "False") return constant(false);
    if (name == "none" || name == "None") return constant(nullptr);
    uses_.caller |= name == "caller";
    uses_.positional |= name == "varargs";
    uses_.keywords |= name == "kwargs";
    return make(Kind::name, name);
  }
  if (token.type == Type::string) {
    std::string text;
    while (peek().type == Type::string) text += take().text;
    return constant(text);
  }
  if (token.type == Type::integer) return constant(std::stoll(take().text));
  if (token.type == Type::real) return constant(std::stod(take().text));
  if (accept_op("(")) {
    if (accept_op(")")) return make(Kind::list, kTuple);
    NodePtr inner = parse_expression();
    if (is_op(",")) {
      inner = make_with(Kind::list, kTuple, std::move(inner));
      while (accept_op(",") && !is_op(")")) inner->children.push_back(parse_expression());
    }
    expect_op(")");
    return inner;
  }
  if (accept_op("[")) return parse_items(Kind::list, "]");
  if (accept_op("{")) return parse_items(Kind::dict, "}");
  refuse();
}

NodePtr ExpressionParser::constant(Json json) const {
  NodePtr node = make(Kind::constant);
  node->value = Value(std::move(json));
  return node;
}

NodePtr ExpressionParser::parse_items(Kind kind, std::string_view end) {
  NodePtr node = make(kind);
  while (!accept_op(end)) {
    if (!node->children.empty()) {
      expect_op(",");
      if (accept_op(end)) break;
    }
    node->children.push_back(parse_expression());
    if (kind != Kind::dict) continue;
    expect_op(":");
    node->children.push_back(parse_expression());
  }
  return node;
}

NodePtr ExpressionParser::parse_postfix(NodePtr node) {
  while (true) {
    if (accept_op(".")) {
      const bool is_index = peek().type == Type::integer;
      NodePtr index = is_index ? constant(std::stoll(take().text)) : nullptr;
      node = is_index ? make_with(Kind::item, "", std::move(node), std::move(index))
                      : make_with(Kind::attribute, take_name(), std::move(node));
    } else if (accept_op("[")) {
      node = parse_subscript(std::move(node));
    } else if (is_op("(")) {
      node = make_with(Kind::call, "", std::move(node));
      parse_arguments(*node);
    } else {
      return node;
    }
  }
}

NodePtr ExpressionParser::parse_subscript(NodePtr object) {
  std::vector<NodePtr> bounds;
  bool is_slice = false;
  for (int i = 0; i < 3; ++i) {
    const bool is_absent = is_op(":") || is_op("]");
    bounds.push_back(is_absent ? make(Kind::nothing) : parse_expression());
    if (i == 2 || !accept_op(":")) break;
    is_slice = true;
  }
  expect_op("]");
  if (!is_slice) {
    if (bounds[0]->kind == Kind::nothing) refuse();
    return make_with(Kind::item, "", std::move(object), std::move(bounds[0]));
  }
  while (bounds.size() < 3) bounds.push_back(make(Kind::nothing));
  return make_with(Kind::slice, "", std::move(object), std::move(bounds[0]), std::move(bounds[1]),
                   std::move(bounds[2]));
}

/// In parentheses: values, then keywords, then "*" and "**", as Jinja2 orders them.
void ExpressionParser::parse_arguments(Node& node) {
  expect_op("(");
  const auto has = [&](std::string_view name) {
    return std::ranges::find(node.names, name) != node.names.end();
  };
  while (!accept_op(")")) {
    if (!node.names.empty()) {
      expect_op(",");
      if (accept_op(")")) return;
    }
    std::string keyword;
    if (has("**")) refuse();
    if (is_op("*") || is_op("**")) {
      if (has(peek().text)) refuse();
      keyword = take().text;
    } else if (peek().type == Type::name && peek(1).type == Type::op && peek(1).text == "=") {
      keyword = take().text;
      take();
    } else if (std::ranges::any_of(node.names, [](auto& name) { return !name.empty(); })) {
      refuse();
    }
    node.names.push_back(keyword);
    node.children.push_back(parse_expression());
  }
}

NodePtr ExpressionParser::parse_filters(NodePtr node) {
  while (true) {
    if (accept_op("|")) {
      node = make_with(Kind::filter, take_name(), std::move(node));
      if (is_op("(")) parse_arguments(*node);
    } else if (accept_name("is")) {
      node = parse_test(std::move(node));
    } else if (is_op("(")) {
      node = make_with(Kind::call, "", std::move(node));
      parse_arguments(*node);
    } else {
      return node;
    }
  }
}

NodePtr ExpressionParser::parse_test(NodePtr value) {
  const bool is_negated = accept_name("not");
  NodePtr node = make_with(Kind::test, take_name(), std::move(value));
  if (is_op("(")) {
    parse_arguments(*node);
  } else if (has_test_argument()) {
    node->names.emplace_back();
    node->children.push_back(parse_postfix(parse_primary()));
  }
  return is_negated ? make_with(Kind::unary, "not", std::move(node)) : std::move(node);
}

bool ExpressionParser::has_test_argument() const {
  const Token& token = peek();
  if (token.type == Type::op) return token.text == "[" || token.text == "{";
  if (token.type == Type::name) {
    if (token.text == "is") refuse();  // as Jinja2, which has no chain of tests
    return token.text != "else" && token.text != "or" && token.text != "and";
  }
  return token.type == Type::string || token.type == Type::integer || token.type == Type::real;
}

}  // namespace tandem::jinja
