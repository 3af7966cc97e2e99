#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/printable.h"
#include "engine/chat/jinja_lexer.h"
#include "engine/chat/jinja_syntax.h"

namespace tandem::jinja {
namespace {

using NodePtr = std::unique_ptr<Node>;
using Type = Token::Type;

constexpr int kMaxNesting = 100, kMaxHeight = 1000;

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(tokenize(source)) {}

  NodePtr run() {
    NodePtr body = parse_body({});
    if (peek().type != Type::end) refuse();
    if (has_marks_) body->text = "generation";
    return body;
  }

 private:
  struct Nesting {
    explicit Nesting(Parser& parser) : depth(parser.depth_) {
      if (++depth > kMaxNesting) fail(fmt::format("more than {} levels of nesting", kMaxNesting));
    }
    ~Nesting() { --depth; }
    int& depth;
  };

  const Token& peek(size_t ahead = 0) const {
    return tokens_[std::min(at_ + ahead, tokens_.size() - 1)];
  }
  Token take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool is_op(std::string_view op) const { return peek().type == Type::op && peek().text == op; }
  bool is_name(std::string_view name) const {
    return peek().type == Type::name && peek().text == name;
  }
  bool accept_op(std::string_view op) { return is_op(op) && (take(), true); }
  bool accept_name(std::string_view name) { return is_name(name) && (take(), true); }
  [[noreturn]] void refuse() const {
    const Token& token = peek();
    const std::string text = token.type == Type::end          ? "the end of the template"
                             : token.type == Type::block_end  ? "the end of the tag"
                             : token.type == Type::output_end ? "the end of the output"
                                                              : "'" + printable(token.text) + "'";
    fail(fmt::format("line {}: unexpected {}", token.line, text));
  }
  void expect_op(std::string_view op) {
    if (!accept_op(op)) refuse();
  }
  void expect_name(std::string_view name) {
    if (!accept_name(name)) refuse();
  }
  std::string take_name() {
    if (peek().type != Type::name) refuse();
    return take().text;
  }
  void end_block() {
    if (peek().type != Type::block_end) refuse();
    take();
  }
  NodePtr make(Kind kind, std::string text = {}) const {
    auto node = std::make_unique<Node>();
    node->kind = kind;
    node->text = std::move(text);
    node->line = peek().line;
    return node;
  }
  template <typename... Children>
  NodePtr make_with(Kind kind, std::string text, Children... children) const {
    NodePtr node = make(kind, std::move(text));
    (node->children.push_back(std::move(children)), ...);
    for (const NodePtr& child : node->children) {
      node->height = std::max(node->height, child->height + 1);
    }
    if (node->height > kMaxHeight) {
      fail(fmt::format("line {}: expression of more than {} levels", node->line, kMaxHeight));
    }
    return node;
  }

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
    if (name == "macro") return parse_macro();
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
    fail(fmt::format("line {}: tag '{}': expected for, if, set, macro, break or continue", line,
                     printable(name)));
  }

  NodePtr parse_for() {
    NodePtr node = make(Kind::for_);
    const bool has_parenthesis = accept_op("(");
    do node->names.push_back(take_name());
    while (accept_op(","));
    if (has_parenthesis) expect_op(")");
    expect_name("in");
    node->children.push_back(parse_or());
    node->children.push_back(accept_name("if") ? parse_expression() : make(Kind::nothing));
    if (is_name("recursive")) refuse();
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

  NodePtr parse_set() {
    NodePtr node = make(Kind::set);
    node->names.push_back(take_name());
    if (accept_op(".")) node->names.push_back(take_name());
    if (accept_op("=")) {
      node->children.push_back(parse_tuple());
      end_block();
      return node;
    }
    node->kind = Kind::capture;
    if (node->names.size() > 1) refuse();
    end_block();
    node->children.push_back(parse_body({"endset"}));
    take(), end_block();
    return node;
  }

  NodePtr parse_macro() {
    NodePtr node = make(Kind::macro, take_name());
    std::vector<NodePtr> defaults;
    expect_op("(");
    while (!accept_op(")")) {
      if (!node->names.empty()) expect_op(",");
      node->names.push_back(take_name());
      if (accept_op("=")) {
        defaults.push_back(parse_expression());
      } else if (!defaults.empty()) {
        refuse();
      }
    }
    end_block();
    node->children.push_back(parse_body({"endmacro"}));
    for (NodePtr& each : defaults) node->children.push_back(std::move(each));
    take();
    if (peek().type == Type::name) take();  // its name again
    end_block();
    return node;
  }

  /// An expression, or a list of them without brackets.
  NodePtr parse_tuple() {
    NodePtr first = parse_expression();
    if (!is_op(",")) return first;
    NodePtr list = make_with(Kind::list, "", std::move(first));
    while (accept_op(",")) list->children.push_back(parse_expression());
    return list;
  }

  NodePtr parse_expression() {
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
  NodePtr parse_or() {
    NodePtr left = parse_and();
    while (accept_name("or")) left = make_with(Kind::binary, "or", std::move(left), parse_and());
    return left;
  }
  NodePtr parse_and() {
    NodePtr left = parse_not();
    while (accept_name("and")) left = make_with(Kind::binary, "and", std::move(left), parse_not());
    return left;
  }
  NodePtr parse_not() {
    const Nesting nesting(*this);
    if (accept_name("not")) return make_with(Kind::unary, "not", parse_not());
    return parse_comparison();
  }
  NodePtr parse_comparison() {
    NodePtr left = parse_sum();
    std::string op;
    while (!(op = take_comparison()).empty()) {
      left = make_with(Kind::binary, op, std::move(left), parse_sum());
      if (!peek_comparison().empty() && op != "in" && op != "not in") refuse();  // a < b < c
    }
    return left;
  }
  std::string peek_comparison() const {
    for (const char* op : {"==", "!=", ">=", "<=", ">", "<"}) {
      if (is_op(op)) return op;
    }
    if (is_name("in")) return "in";
    return is_name("not") && peek(1).type == Type::name && peek(1).text == "in" ? "not in" : "";
  }
  std::string take_comparison() {
    const std::string op = peek_comparison();
    if (!op.empty()) take();
    if (op == "not in") take();
    return op;
  }
  NodePtr parse_sum() {
    return parse_left({"+", "-"}, [&] {
      return parse_left({"~"}, [&] {
        return parse_left({"*", "/", "//", "%"},
                          [&] { return parse_left({"**"}, [&] { return parse_unary(true); }); });
      });
    });
  }
  template <typename Operand>
  NodePtr parse_left(std::initializer_list<std::string_view> ops, const Operand& operand) {
    NodePtr left = operand();
    while (peek().type == Type::op && std::ranges::find(ops, peek().text) != ops.end()) {
      const std::string op = take().text;
      left = make_with(Kind::binary, op, std::move(left), operand());
    }
    return left;
  }
  NodePtr parse_unary(bool has_filters) {
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

  NodePtr parse_primary() {
    const Token token = peek();
    if (token.type == Type::name) {
      take();
      const std::string& name = token.text;
      if (name == "true" || name == "True") return constant(true);
      if (name == "false" || name == "False") return constant(false);
      if (name == "none" || name == "None") return constant(nullptr);
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
      if (accept_op(")")) return make(Kind::list);
      NodePtr inner = parse_expression();
      if (is_op(",")) {
        inner = make_with(Kind::list, "", std::move(inner));
        while (accept_op(",") && !is_op(")")) inner->children.push_back(parse_expression());
      }
      expect_op(")");
      return inner;
    }
    if (accept_op("[")) return parse_items(Kind::list, "]");
    if (accept_op("{")) return parse_items(Kind::dict, "}");
    refuse();
  }
  NodePtr constant(Json json) const {
    NodePtr node = make(Kind::constant);
    node->value = Value(std::move(json));
    return node;
  }
  NodePtr parse_items(Kind kind, std::string_view end) {
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

  NodePtr parse_postfix(NodePtr node) {
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
  NodePtr parse_subscript(NodePtr object) {
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
  /// In parentheses.
  void parse_arguments(Node& node) {
    expect_op("(");
    while (!accept_op(")")) {
      if (!node.names.empty()) {
        expect_op(",");
        if (accept_op(")")) return;
      }
      std::string keyword;
      if (peek().type == Type::name && peek(1).type == Type::op && peek(1).text == "=") {
        keyword = take().text;
        take();
      }
      node.names.push_back(keyword);
      node.children.push_back(parse_expression());
    }
  }

  NodePtr parse_filters(NodePtr node) {
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
  NodePtr parse_test(NodePtr value) {
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
  bool has_test_argument() const {
    const Token& token = peek();
    if (token.type == Type::op) return token.text == "[" || token.text == "{";
    if (token.type == Type::name) {
      if (token.text == "is") refuse();  // as Jinja2, which has no chain of tests
      return token.text != "else" && token.text != "or" && token.text != "and";
    }
    return token.type == Type::string || token.type == Type::integer || token.type == Type::real;
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  bool has_marks_ = false;
};

}  // namespace

std::unique_ptr<Node> parse(std::string_view source) {
  return Parser(source).run();
}

}  // namespace tandem::jinja
