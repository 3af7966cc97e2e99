// Tokens of a template.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tandem::jinja {

struct Token {
  enum class Type : uint8_t {
    text,
    block_begin,
    block_end,
    output_begin,
    output_end,
    name,
    integer,
    real,
    string,
    op,
    end
  };
  Type type;
  std::string text;  ///< of a string its value
  int line;
};

/// White space next to tags is stripped as trim_blocks and lstrip_blocks say. The last token has
/// the type `end`. Throws ConfigError naming the line.
std::vector<Token> tokenize(std::string_view source);

}  // namespace tandem::jinja
