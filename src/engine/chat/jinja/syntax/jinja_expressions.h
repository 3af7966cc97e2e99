// Parses expressions of templates.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "engine/chat/jinja/syntax/jinja_token_reader.h"

namespace tandem::jinja {

class ExpressionParser : public TokenReader {
 protected:
  using TokenReader::TokenReader;

  /// Names with a meaning in macros that are used so far.
  struct Uses {
    bool caller = false, positional = false, keywords = false;
  };
  Uses uses_;

  NodePtr parse_tuple();
  NodePtr parse_items_of_loop();
  NodePtr parse_expression();
  NodePtr parse_or();
  NodePtr parse_and();
  NodePtr parse_not();
  NodePtr parse_comparison();
  std::string peek_comparison() const;
  std::string take_comparison();
  NodePtr parse_sum();
  template <typename Operand>
  NodePtr parse_left(std::initializer_list<std::string_view> ops, const Operand& operand);
  NodePtr parse_unary(bool has_filters);
  NodePtr parse_primary();
  NodePtr constant(Json json) const;
  NodePtr parse_items(Kind kind, std::string_view end);
  NodePtr parse_postfix(NodePtr node);
  NodePtr parse_subscript(NodePtr object);
  void parse_arguments(Node& node);
  NodePtr parse_filters(NodePtr node);
  NodePtr parse_test(NodePtr value);
  bool has_test_argument() const;
};

}  // namespace tandem::jinja
