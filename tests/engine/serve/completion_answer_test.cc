// Events of streams, byte for byte as one JSON of all their fields has them.
#include "engine/serve/completion_answer.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/system/json.h"
#include "tandem/random.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

/// Parts of texts, also such as JSON escapes, parts of characters, and bytes that are in none.
const std::string kStrings[] = {"the",
                                " of",
                                "\n",
                                "\"",
                                "\\",
                                "\t\r\b\f",
                                std::string(1, '\0'),
                                "\x1f",
                                "\x7f",
                                "?",
                                "\"?\"",
                                "\xe6\x97\xa5",
                                "\xe6\x97",
                                "\xa5",
                                "\xf0\x9f\x98\x80",
                                "\xf0\x9f",
                                "\xff",
                                "\xc3",
                                "\xa9",
                                "</s>",
                                "\xe2\x80\xa8",
                                "",
                                ""};
const std::string kNames[] = {"m", "a \"?\" b", "\\?", "models/\xe6\x97\xa5", "\xff\"?\""};

class Cases {
 public:
  explicit Cases(uint64_t seed) : seed_(seed) {}
  uint64_t below(uint64_t end) { return philox(seed_, 0, next_++)[0] % end; }

 private:
  const uint64_t seed_;
  uint64_t next_ = 0;
};

TokenEvent random_token(Cases& cases, bool is_last) {
  TokenEvent token{0, 1, -0.5f, "", std::nullopt};
  for (uint64_t left = cases.below(4); left > 0; --left) {
    token.text += kStrings[cases.below(std::size(kStrings))];
  }
  if (is_last) token.finish = cases.below(2) == 0 ? Finish::max_tokens : Finish::stop_string;
  return token;
}

struct Stream {
  ServedModel model;
  CompletionRequest request;
};

Stream random_stream(Cases& cases) {
  Stream stream;
  stream.model.name = kNames[cases.below(std::size(kNames))];
  CompletionRequest& request = stream.request;
  request.is_chat = cases.below(2) == 0;
  request.streams = true;
  request.choices.resize(1 + cases.below(3));
  request.echoes = !request.is_chat && cases.below(3) == 0;
  for (size_t i = 0; request.echoes && i < request.choices.size(); ++i) {
    request.echoed.push_back(kStrings[cases.below(3)]);
  }
  return stream;
}

/// An event with `text`, built as a tree.
std::string expected_event(const Stream& stream, const Json& created, size_t choice,
                           const std::string& text, std::optional<Finish> finish) {
  const bool is_chat = stream.request.is_chat;
  Json json{{"index", choice}};
  if (is_chat) {
    json["delta"] = Json::object();
    if (!text.empty()) json["delta"]["content"] = text;
  } else {
    json["text"] = text;
  }
  json["logprobs"] = nullptr;
  json["finish_reason"] = nullptr;
  if (finish) json["finish_reason"] = finish == Finish::max_tokens ? "length" : "stop";
  const Json event{{"id", is_chat ? "chatcmpl-7" : "cmpl-7"},
                   {"object", is_chat ? "chat.completion.chunk" : "text_completion"},
                   {"created", created},
                   {"model", stream.model.name},
                   {"choices", Json::array({json})}};
  return "data: " + dump_json(event) + "\n\n";
}

Json parse_event(std::string_view event) {
  EXPECT_TRUE(event.starts_with("data: ") && event.ends_with("\n\n")) << event;
  return parse_json<Json>(event.substr(6));
}

TEST(CompletionAnswer, StreamsTheBytesOfWholeTrees) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    Cases cases(seed);
    const Stream stream = random_stream(cases);
    CompletionAnswer answer(stream.model, stream.request, "7");
    EXPECT_EQ(answer.begin().empty(), !stream.request.is_chat);
    std::vector<Utf8Stream> characters(stream.request.choices.size());
    std::optional<Json> created;
    const uint64_t tokens = 1 + cases.below(12);
    for (uint64_t at = 0; at < tokens; ++at) {
      for (size_t choice = 0; choice < characters.size(); ++choice) {
        const TokenEvent token = random_token(cases, at + 1 == tokens);
        std::string text;
        if (at == 0 && stream.request.echoes) text = stream.request.echoed[choice];
        text += characters[choice].add(token.text);
        if (token.finish) text += characters[choice].rest();
        const std::string event = answer.add(choice, token);
        if (text.empty() && !token.finish) {
          EXPECT_EQ(event, "");
          continue;
        }
        if (!created) created = parse_event(event)["created"];
        ASSERT_EQ(event, expected_event(stream, *created, choice, text, token.finish));
      }
    }
    EXPECT_TRUE(answer.is_done());
    EXPECT_EQ(answer.tokens(), int64_t(tokens * characters.size()));
  }
}

/// With functions a part of the text is held back, and calls are events of their own: all between
/// them have the text.
TEST(CompletionAnswer, StreamsCallsBetweenTexts) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    Cases cases(seed);
    Stream stream = random_stream(cases);
    stream.request.is_chat = true;
    stream.request.echoes = false;
    stream.request.choices.resize(1);
    stream.request.tools = {"f"};
    CompletionAnswer answer(stream.model, stream.request, "7");
    const std::string whole = "Let me \"see\".<tool_call>{\"name\": \"f\"}</tool_call>";
    std::string text;
    size_t calls = 0;
    for (size_t begin = 0, size = 0; begin < whole.size(); begin += size) {
      size = 1 + cases.below(5);
      TokenEvent token{0, 1, 0, whole.substr(begin, size), std::nullopt};
      if (begin + size >= whole.size()) token.finish = Finish::end_token;
      const std::string event = answer.add(0, token);
      if (event.empty()) continue;
      const Json choice = parse_event(event)["choices"][0];
      text += choice["delta"].value("content", "");
      if (choice["delta"].contains("tool_calls")) calls += choice["delta"]["tool_calls"].size();
      EXPECT_EQ(choice["finish_reason"].is_null(), !token.finish);
      EXPECT_EQ(event, "data: " + dump_json(parse_event(event)) + "\n\n");
    }
    EXPECT_EQ(text, "Let me \"see\".");
    EXPECT_EQ(calls, 1u);
  }
}

}  // namespace
}  // namespace tandem
