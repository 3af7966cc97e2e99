// Reads the tokens of a template one after the other, and makes nodes of its tree.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/system/printable.h"
#include "engine/chat/jinja/syntax/jinja_lexer.h"
#include "engine/chat/jinja/syntax/jinja_syntax.h"

namespace tandem::jinja {

using NodePtr = std::unique_ptr<Node>;

class TokenReader {
 protected:
  using Type = Token::Type;
  static constexpr int kMaxNesting = 100, kMaxHeight = 1000;

  explicit TokenReader(std::string_view source) : tokens_(tokenize(source)) {}

  struct Nesting {
    explicit Nesting(TokenReader& reader) : depth(reader.depth_) {
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

 private:
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace tandem::jinja
