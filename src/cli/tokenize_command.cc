#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "core/system/console.h"
#include "core/system/console_input.h"
#include "core/system/json.h"
#include "core/system/printable.h"
#include "core/system/process/clock.h"
#include "engine/tokenizer/open.h"
#include "engine/tokenizer/text_decoder.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMaxInputMib = 1024;

struct TokenizeArguments {
  std::string path;
  std::optional<std::string> text;
  bool decodes = false, adds = false, skips_special = false, as_json = false, by_line = false,
       shows_time = false;
};

/// Bytes and tokens that were encoded, and the time it took.
struct Encoded {
  size_t bytes = 0, tokens = 0;
  double seconds = 0;
};

std::vector<int32_t> encode(const TextTokenizer& tokenizer, const TokenizeArguments& arguments,
                            std::string_view text, Encoded& all) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<int32_t> tokens;
  tokenizer.encode(text, arguments.adds, tokens);
  all.seconds += seconds_since(begin);
  all.bytes += text.size();
  all.tokens += tokens.size();
  return tokens;
}

std::string text_of(const TextTokenizer& tokenizer, const std::vector<int32_t>& tokens,
                    bool skips_special) {
  Utf8Stream stream;
  std::string text = stream.add(tokenizer.decode(tokens, skips_special));
  return text += stream.rest();
}

/// Numbers between spaces, commas and brackets.
std::vector<int32_t> parse_tokens(std::string_view text, int64_t vocab) {
  std::vector<int32_t> tokens;
  constexpr std::string_view kBetween = " \t\r\n,[]";
  for (size_t at = text.find_first_not_of(kBetween); at != text.npos;
       at = text.find_first_not_of(kBetween, at)) {
    const size_t end = std::min(text.find_first_of(kBetween, at), text.size());
    int32_t token = 0;
    const auto parsed = std::from_chars(text.data() + at, text.data() + end, token);
    if (parsed.ec != std::errc() || parsed.ptr != text.data() + end || token < 0 ||
        token >= vocab) {
      throw InvalidArgument(fmt::format("--decode: {}: expected tokens from 0 to {}",
                                        printable(text.substr(at, end - at)), vocab - 1));
    }
    tokens.push_back(token);
    at = end;
  }
  return tokens;
}

ordered_json to_json(const TextTokenizer& tokenizer, const std::string& text,
                     const std::vector<int32_t>& tokens) {
  ordered_json texts = ordered_json::array();
  for (const int32_t token : tokens) {
    Utf8Stream stream;
    bool is_begin = false;
    std::string bytes;
    tokenizer.decode(token, false, is_begin, bytes);
    std::string token_text = stream.add(bytes);
    texts.push_back(token_text += stream.rest());
  }
  return {{"tokenizer", tokenizer.name()},
          {"vocab", tokenizer.vocab()},
          {"bytes", text.size()},
          {"text", text},
          {"tokens", tokens},
          {"texts", texts}};
}

void print(const ordered_json& value, int indent) {
  fmt::print("{}\n", dump_json(value, indent));
}

/// Lines are JSON: texts or {"text": ...}, and lists of tokens.
void tokenize_line(const TextTokenizer& tokenizer, const TokenizeArguments& arguments,
                   std::string_view line, size_t number, Encoded& all) {
  const auto fail = [&](const char* expected) {
    throw InvalidArgument(
        fmt::format("--lines: line {} is {}: expected {}", number, printable(line, 60), expected));
  };
  const ordered_json value = ordered_json::parse(line, nullptr, false);
  if (arguments.decodes) {
    if (!value.is_array()) fail("a list of tokens");
    print(text_of(tokenizer, parse_tokens(line, tokenizer.vocab()), arguments.skips_special), -1);
    return;
  }
  const bool is_object = value.is_object() && value.contains("text");
  const ordered_json& text = is_object ? value["text"] : value;
  if (!text.is_string()) fail("a JSON text or {\"text\": \"...\"}");
  print(encode(tokenizer, arguments, text.get<std::string>(), all), -1);
}

void tokenize_lines(const TextTokenizer& tokenizer, const TokenizeArguments& arguments,
                    std::string_view input, Encoded& all) {
  size_t number = 0;
  for (size_t begin = 0; begin < input.size();) {
    const size_t end = std::min(input.find('\n', begin), input.size());
    tokenize_line(tokenizer, arguments, input.substr(begin, end - begin), ++number, all);
    begin = end + 1;
  }
}

void run(const TokenizeArguments& arguments) {
  now_doing("tokenizing with " + arguments.path);
  const auto tokenizer = open_tokenizer(arguments.path);
  for (const std::string& text : tokenizer->notes()) {
    complain(fmt::format("note: {}: {}", single_line(arguments.path), text));
  }
  const std::string input = arguments.text ? *arguments.text : read_input("tokenize", kMaxInputMib);
  Encoded all;
  if (arguments.by_line) {
    tokenize_lines(*tokenizer, arguments, input, all);
  } else if (arguments.decodes) {
    const std::vector<int32_t> tokens = parse_tokens(input, tokenizer->vocab());
    const std::string text = text_of(*tokenizer, tokens, arguments.skips_special);
    arguments.as_json ? print(to_json(*tokenizer, text, tokens), 1) : fmt::print("{}\n", text);
  } else {
    const std::vector<int32_t> tokens = encode(*tokenizer, arguments, input, all);
    arguments.as_json ? print(to_json(*tokenizer, input, tokens), 1)
                      : fmt::print("{}\n", fmt::join(tokens, " "));
  }
  finish_output();
  if (!arguments.shows_time || arguments.decodes) return;
  complain(fmt::format("{} tokens of {} bytes in {:.6f} s: {:.2f} MB/s", all.tokens, all.bytes,
                       all.seconds, double(all.bytes) / 1e6 / std::max(all.seconds, 1e-9)));
}

}  // namespace

void add_tokenize(CLI::App& app) {
  auto arguments = std::make_shared<TokenizeArguments>();
  auto* command = app.add_subcommand("tokenize", "Encode text as tokens, or decode tokens");
  command
      ->add_option(
          "path", arguments->path,
          "tokenizer.json, tekken.json, SentencePiece .model, vocab.json next to merges.txt, "
          ".tiktoken, or their folder")
      ->required();
  command->add_option("--text", arguments->text, "Text or tokens (default: standard input)");
  command->add_flag("--decode", arguments->decodes, "Decode tokens to text");
  command->add_flag("--add-special", arguments->adds,
                    "Add the tokens that the file adds to each text, such as <s>");
  command->add_flag("--skip-special", arguments->skips_special, "Decode without special tokens");
  auto* json =
      command->add_flag("--json", arguments->as_json, "Print tokens and their texts as JSON");
  command
      ->add_flag("--lines", arguments->by_line,
                 "Read a line of JSON at a time: a text or {\"text\": ...}, or with --decode a "
                 "list of tokens")
      ->excludes(json);
  command->add_flag("--time", arguments->shows_time,
                    "Print the time that encoding took, on one thread, to standard error");
  command->footer(
      "\nExamples:\n"
      "  tandem tokenize tests/engine/tokenizer/data/small_bytes.json --text 'Hello, world'\n"
      "  tandem tokenize tests/engine/tokenizer/data/small_bytes.json --text '41 42' --decode");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace tandem::cli
