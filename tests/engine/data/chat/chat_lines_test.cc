#include "engine/data/text/chat_lines.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "chat_cases.h"
#include "engine/data/sampler.h"
#include "engine/data/scored_windows.h"
#include "engine/data/text/chat_messages.h"
#include "engine/data/text/documents.h"
#include "tandem/error.h"
#include "tests/engine/data/open_configured.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

TrainConfig config_of(const std::string& folder, const std::string& data) {
  TrainConfig config;
  config.model.vocab = 1024;
  config.train.seq = 192;
  config.data.paths = {data};
  config.data.tokenizer = folder;
  set_chat_keys(config.data);
  return config;
}

/// '1' where loss is taken.
std::string mask_of(const TokenSource& source, int64_t begin, int64_t end) {
  std::vector<int32_t> targets(size_t(end - begin), 0);
  ignore_unscored(source, begin, targets);
  std::string mask;
  for (const int32_t target : targets) mask += target < 0 ? '0' : '1';
  return mask;
}

TEST(ChatLines, TokensAndMasksAreThoseOfTransformers) {
  const Json cases = chat_cases();
  for (const auto& [name, expected] : cases.items()) {
    SCOPED_TRACE(name);
    const TempDir dir;
    write_chat_tokenizer(dir / "model", name, expected);
    write_chats(dir / "chats.jsonl", expected);
    const TrainConfig config = config_of(dir / "model", dir / "chats.jsonl");
    EXPECT_EQ(config.data.format, "chat");
    const auto source = open_configured(config);
    const auto begins = source->document_begins();
    ASSERT_EQ(begins.size(), expected["chats"].size() + 1);
    for (size_t i = 0; i + 1 < begins.size(); ++i) {
      const Json& chat = expected["chats"][i];
      std::vector<int32_t> tokens(size_t(begins[i + 1] - begins[i]));
      source->read(begins[i], tokens);
      ASSERT_EQ(Json(tokens), chat["tokens"]) << chat;
      ASSERT_EQ(mask_of(*source, begins[i], begins[i + 1]), chat["mask"]) << chat;
    }
    const auto open = [&](const std::string& file) {
      return config_of(dir / "model/" + file, dir / "chats.jsonl");
    };
    EXPECT_EQ(open_configured(open("tokenizer.json"))->fingerprint(), source->fingerprint());
  }
}

// Every answer is a target once, in training and in validation, in sequences of whole chats.
TEST(ChatLines, PackedSequencesScoreEveryAnswerOnce) {
  const Json expected = chat_cases()["llama3"];
  const TempDir dir;
  write_chat_tokenizer(dir / "model", "llama3", expected);
  write_chats(dir / "chats.jsonl", expected);
  std::vector<int32_t> answers, found, validated;
  for (const Json& chat : expected["chats"]) {
    for (size_t i = 0; i < chat["tokens"].size(); ++i) {
      if (chat["mask"].get<std::string>()[i] == '1') answers.push_back(chat["tokens"][i]);
    }
  }
  const auto add = [](std::vector<int32_t>& all, std::span<const int32_t> targets) {
    std::ranges::copy_if(targets, std::back_inserter(all), [](int32_t t) { return t >= 0; });
  };
  const std::shared_ptr<const TokenSource> source =
      open_configured(config_of(dir / "model", dir / "chats.jsonl"));
  const Sampler sampler(*source, 192, 1, {{}, true, true});
  EXPECT_LT(sampler.windows(), 20);
  for (int64_t sample = 0; sample < sampler.windows(); ++sample) {
    std::vector<int32_t> tokens(192), targets(192), starts(192);
    sampler.read(sample, tokens, targets, starts);
    EXPECT_EQ(192 - std::ranges::count(targets, -1), sampler.targets(sample));
    add(found, targets);
  }
  const PackedWindows windows(source, 192, 0);
  for (int64_t i = 0; i < windows.count(); ++i) add(validated, windows.read(i).targets);
  for (auto* all : {&answers, &found, &validated}) std::ranges::sort(*all);
  EXPECT_EQ(found, answers);
  EXPECT_EQ(validated, answers);
}

std::string render_answers_of(const ChatTemplate& form, const std::string& line) {
  const RenderedChat chat = render_answers(form, parse_chat(line));
  std::string answers;
  for (const TextSpan& span : chat.answers) {
    answers += "<" + chat.text.substr(span.begin, span.end - span.begin) + ">";
  }
  return answers;
}

// As Qwen 3: thoughts are written of the last answer only.
TEST(ChatLines, AnswersAreFoundWhereEarlierThoughtsAreLeftOut) {
  const ChatTemplate form(
      "{% for m in messages %}{{ '[' + m.role + ']' }}"
      "{% if m.role == 'assistant' and loop.last %}{{ '(' + (m.thought or '') + ')' }}{% endif %}"
      "{{ m.content + '.' }}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif "
      "%}",
      {});
  const std::string begin = R"({"messages": [{"role": "user", "content": "a"},)";
  EXPECT_EQ(render_answers_of(
                form, begin + R"({"role": "assistant", "content": "b", "thought": "t"},)"
                              R"({"role": "user", "content": "c"},)"
                              R"({"role": "assistant", "content": "dd", "thought": "u"}]})"),
            "<b.><(u)dd.>");
  EXPECT_EQ(render_answers_of(form, begin + R"({"role": "assistant", "content": "b", "weight": 0},)"
                                            R"({"role": "user", "content": "c"},)"
                                            R"({"role": "assistant", "content": "d"}]})"),
            "<()d.>");
}

TEST(ChatLines, WeightsChooseAmongMarkedAnswers) {
  const ChatTemplate form(
      "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
      "{% endgeneration %}{% else %}{{ m.content }}{% endif %}|{% endfor %}",
      {});
  const std::string line =
      R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0},
          {"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "weight": 1}]})";
  EXPECT_EQ(render_answers_of(form, line), "<d>");
  EXPECT_EQ(form.render(Json::parse(line)), "a|b|c|d|");
}

struct BadLine {
  std::string line, reason;
};

TEST(ChatLines, LinesThatAreNoChatsAreNamed) {
  const Json expected = chat_cases()["mistral"];
  const TempDir dir;
  write_chat_tokenizer(dir / "model", "mistral", expected);
  const std::string good = R"({"messages": [{"role": "user", "content": "a"}, )"
                           R"({"role": "assistant", "content": "b"}]})";
  const auto chat = [](const std::string& messages) {
    return R"({"messages": [)" + messages + "]}";
  };
  const std::string user = R"({"role": "user", "content": "a"})";
  const BadLine lines[] = {
      {"{\"messages\": [", "no JSON object: expected {\"messages\": [...]}"},
      {"[]", "no JSON object"},
      {"{\"prompt\": \"a\"}", "none of the keys of a chat: expected"},
      {"{\"messages\": []}", "messages = []: expected a list of messages"},
      {"{\"conversations\": \"x\"}", "conversations = \"x\": expected a list of messages"},
      {chat("3"), "message 1: expected an object with role and content"},
      {chat(user + R"(, {"role": "narrator", "content": "b"})"),
       "message 2: role = \"narrator\": expected system, developer, user"},
      {R"({"conversations": [{"from": "human", "value": "a"}, {"from": "bot", "value": "b"}]})",
       "message 2: from = \"bot\": expected"},
      {chat(R"({"content": "a"})"), "message 1: role = null: expected"},
      {chat(R"({"role": "user", "content": 3})"), "message 1: content = 3: expected text"},
      {chat(R"({"role": "user"})"), "message 1: content = null: expected text"},
      {R"({"conversations": [{"from": "human", "value": null}]})",
       "message 1: value = null: expected text"},
      {chat(user), "no answer: expected a message of the assistant"},
      {R"({"instruction": "a"})", "no output: expected the answer"},
      {R"({"instruction": "", "output": "b"})", "instruction is empty"},
      {R"({"instruction": "a", "output": 4})", "output = 4: expected text"},
      {R"({"instruction": "a", "output": " "})", "every token is masked: expected an answer"},
      {chat(user + R"(, {"role": "assistant", "content": "b", "weight": 0})"),
       "every token is masked: expected an answer"},
      {chat(user + ", " + user), "no answer"},
      {chat(user + ", " + user + R"(, {"role": "assistant", "content": "b"})"),
       "chat_template.jinja: line 1: the template refuses the messages: Conversation roles must"},
      {R"({"instruction": "a", "output": ")" + std::string(900, 'x') + "\"}",
       "expected at most 193, one more than the context"}};
  for (const BadLine& bad : lines) {
    write_bytes(dir / "x.jsonl", good + "\n" + bad.line + "\n" + good + "\n");
    try {
      open_configured(config_of(dir / "model", dir / "x.jsonl"));
      ADD_FAILURE() << "accepted: " << bad.line;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(dir / "x.jsonl:2: "));
      EXPECT_THAT(error.what(), HasSubstr(bad.reason));
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    }
  }
}

TEST(ChatLines, TemplateWhoseChatsDoNotBeginWithPromptsIsRefused) {
  const Json expected = chat_cases()["chatml"];
  const TempDir dir;
  write_chat_tokenizer(dir / "model", "chatml", expected);
  write_bytes(dir / "x.jsonl", R"({"instruction": "a", "output": "b"})");
  const std::pair<const char*, const char*> templates[] = {
      {"{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
       "x.jsonl:1: message 2: chat template: the text before this answer is not its prompt"},
      {"{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
       "x.jsonl:1: message 2: every token of this answer is masked: expected a chat template"},
      {"{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}",
       "x.jsonl:1: every token is masked: expected an answer that {% generation %} marks"}};
  for (const auto& [form, reason] : templates) {
    write_bytes(dir / "model/chat_template.jinja", form);
    try {
      open_configured(config_of(dir / "model", dir / "x.jsonl"));
      ADD_FAILURE() << "accepted: " << form;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(reason));
    }
  }
}

TEST(ChatLines, KeysThatChatsDoNotHaveAreRefused) {
  const Json expected = chat_cases()["chatml"];
  const TempDir dir;
  write_chat_tokenizer(dir / "model", "chatml", expected);
  write_chats(dir / "x.jsonl", expected);
  const auto refusal = [&](const auto& change) -> std::string {
    TrainConfig config = config_of(dir / "model", dir / "x.jsonl");
    change(config.data);
    try {
      open_configured(config);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(refusal([](auto& data) { data.tokenizer = ""; }),
              HasSubstr("data.format is chat: expected data.tokenizer"));
  EXPECT_THAT(refusal([](auto& data) { data.order = "stream"; }),
              HasSubstr("data.order is stream: expected shuffle"));
  EXPECT_THAT(refusal([](auto& data) { data.packing = "none"; }),
              HasSubstr("expected data.packing = best_fit"));
  EXPECT_THAT(refusal([](auto& data) { data.document_separator = "x"; }),
              HasSubstr("data.document_separator"));
  std::filesystem::remove(dir / "model/chat_template.jinja");
  EXPECT_THAT(refusal([](auto&) {}), HasSubstr("no chat template"));
}

}  // namespace
}  // namespace tandem
