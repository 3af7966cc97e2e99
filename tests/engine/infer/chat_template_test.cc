// Templates of chats against Jinja2: tests/engine/infer/chat/cases.json has the texts that it makes
// with the options of transformers.
#include "engine/chat/chat_template.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include "core/system/files.h"
#include "core/system/json.h"
#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

/// Text of the chat; nullopt, with the reason in `error`, if it is refused.
std::optional<std::string> render(const std::string& source, const Json& chat,
                                  const std::map<std::string, std::string>& tokens,
                                  std::string& error) {
  try {
    return ChatTemplate(source, tokens).render(chat);
  } catch (const ConfigError& e) {
    error = e.what();
    return {};
  }
}

TEST(ChatTemplate, TextsAreThoseOfJinja2) {
  const Json all = Json::parse(read_file(TANDEM_TEST_CHAT "/cases.json"));
  const auto tokens = all["tokens"].get<std::map<std::string, std::string>>();
  int texts = 0, refused = 0;
  for (const Json& each : all["cases"]) {
    const std::string source = all["templates"][each["template"].get<size_t>()];
    std::string error;
    const auto text = render(source, all["chats"][each["chat"].get<size_t>()], tokens, error);
    if (each["text"].is_null()) {
      EXPECT_FALSE(text) << source << "\nchat " << each["chat"] << ": " << text.value_or("");
      EXPECT_TRUE(text || error.starts_with("line ")) << error;
      EXPECT_EQ(error.find('\n'), std::string::npos) << error;
      continue;
    }
    ++texts;
    if (!text && each["template"] >= all["random_from"]) {  // no published template has such
      ++refused;
      continue;
    }
    EXPECT_EQ(text, each["text"].get<std::string>())
        << source << "\nchat " << each["chat"] << ": " << error;
  }
  EXPECT_GT(texts, 300);
  EXPECT_LT(refused, 10);
}

TEST(ChatTemplate, ChatsWithToolsTakeTheirTemplate) {
  SideFiles side;
  side.folder = "folder";
  side.templates = {{"default", {"file", "D{{ bos_token }}{{ messages[0].content }}"}},
                    {"tool_use", {"file", "T{{ tools[0].name }}"}}};
  const ChatTemplate form(side, {{"bos_token", "<s>"}});
  const Json messages = Json::array({{{"role", "user"}, {"content", "hi"}}});
  EXPECT_EQ(form.render(messages), "D<s>hi");
  EXPECT_EQ(form.render({{"messages", messages}, {"tools", Json::array()}}), "D<s>hi");
  EXPECT_EQ(form.render({{"messages", messages}, {"tools", nullptr}}), "D<s>hi");
  const Json tools = Json::array({{{"name", "add"}}});
  EXPECT_EQ(form.render({{"messages", messages}, {"tools", tools}}), "Tadd");
  const auto error_of = [](const SideFiles& files) {
    try {
      ChatTemplate(files, {});
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  side.templates["tool_use"].text = "{% if %}";
  EXPECT_TRUE(error_of(side).starts_with("file: line 1: ")) << error_of(side);
  side.templates.erase("default");
  side.templates["tool_use"].text = "T";
  EXPECT_EQ(error_of(side), "folder: chat templates named tool_use: expected one named default");
  side.templates.clear();
  EXPECT_TRUE(error_of(side).starts_with("folder: no chat template: ")) << error_of(side);
}

TEST(ChatTemplate, HostileTemplatesAreRefusedInBoundedTime) {
  const Json chat = Json::parse(R"([{"role": "user", "content": "x"}])");
  const auto repeated = [](const std::string& text, int count) {
    std::string all;
    for (int i = 0; i < count; ++i) all += text;
    return all;
  };
  const std::string templates[] = {
      repeated("{{ (", 5000),
      "{{ " + repeated("(", 5000) + "1",
      "{{ " + repeated("not ", 100000) + "1 }}",
      "{{ 1" + repeated("+1", 100000) + " }}",
      "{{ x" + repeated("[0]", 100000) + " }}",
      repeated("{% if 1 %}", 5000) + repeated("{% endif %}", 5000),
      "{% if 1 %}" + repeated("{% elif 1 %}", 5000) + "{% endif %}",
      "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
      "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor "
      "%}",
      "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
      "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}",
      "{{ 'abc' * 999999999 }}",
      "{{ '' * 999999999999999999 }}{{ nothing.x }}",
      "{% set n = namespace(x=1) %}{% for i in range(9999) %}{% set n.x = [n.x] %}{% endfor %}",
      "{% set n = namespace(x=1) %}{% for i in range(9999) %}{% for a in [n.x, 1] %}"
      "{% set n.x = loop %}{% endfor %}{% endfor %}",
      "\xff",
      "{{ range(999999999) }}",
      "{{ [1, 2][:999999999999999999:-999999999999999999] }}{{ 1 / 0 }}",
      "{% for x, y in [[1]] %}{% endfor %}",
      "{{ '\\ud800' }}",
      "{% macro f() %}" + repeated("{% if 1 %}", 45) + "{{ f()" + repeated("~'a'", 900) + " }}" +
          repeated("{% endif %}", 45) + "{% endmacro %}{{ f() }}",
      "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor "
      "%}",
      "{% set n = namespace(x={}) %}{% for i in range(99) %}{% set n.x = {'a': n.x, 'b': n.x} %}"
      "{% endfor %}",
      "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = dict(a=n.x, b=n.x) %}"
      "{% endfor %}",
      "{% set s = 'ab' * 4000000 %}{{ range(100000)|join(s) }}",
      "{% set s = 'ab' * 4000000 %}{{ s|replace('a', s) }}",
      "{% set s = 'a\n' * 4000000 %}{{ s|indent(1000) }}",
      "{% set s = 'ab' * 4000000 %}{{ range(100000)|map('replace', '0', s)|list|length }}",
      "{% set s = 'ab' * 400000 %}{% for i in range(90000) %}{{ s[-1] }}{% endfor %}",
      "{{ range(90000)|map('list')|list }}",
      "{{ '%*d' % (-999999999999999999 * 9 - 223372036854775817, 1) }}"};
  for (const std::string& source : templates) {
    std::string error;
    EXPECT_FALSE(render(source, chat, {}, error)) << source.substr(0, 60);
    EXPECT_TRUE(error.starts_with("line ") || error.starts_with("more than")) << error;
  }
}

TEST(ChatTemplate, TimeOfLargeChatsIsBounded) {
  Json message{{"role", "user"}, {"content", ""}};
  std::string& content = message["content"].get_ref<std::string&>();
  for (int i = 0; i < 1'000'000; ++i) content += "a ";
  std::string error;
  EXPECT_EQ(render("{{ messages[0].content.split()|length }} {{ messages[0].content|trim|length }}",
                   Json::array({message}), {}, error),
            "1000000 1999999")
      << error;
  message["content"] = std::string(1'000'000, ' ') + "a";
  EXPECT_EQ(render("{{ (messages[0].content|title)|length }}", Json::array({message}), {}, error),
            "1000001")
      << error;
  std::string text = R"({"role": "user", "content": "x")";
  for (int i = 0; i < 300'000; ++i) text += ", \"" + std::to_string(i) + "\": 0";
  const Json chat = Json::array({parse_json<Json>(text + "}")});
  for (const std::string work :
       {"messages[0].z", "messages[0]['z']", "'z' in messages[0]", "messages|selectattr('z')|list",
        "messages[0]|length", "messages[0].get('z')"}) {
    EXPECT_FALSE(
        render("{% for i in range(90000) %}{{ " + work + " }}{% endfor %}", chat, {}, error));
    EXPECT_TRUE(error.ends_with("more steps than a chat needs")) << work << ": " << error;
  }
}

TEST(ChatTemplate, DamagedTemplatesAreWrittenOrRefused) {
  const Json all = Json::parse(read_file(TANDEM_TEST_CHAT "/cases.json"));
  int texts = 0, refusals = 0;
  for (uint64_t trial = 0; trial < 4000; ++trial) {
    uint64_t count = 0;
    const auto below = [&](size_t bound) {
      return size_t(philox(9, trial, count++)[0] % uint64_t(std::max<size_t>(1, bound)));
    };
    std::string source = all["templates"][below(all["templates"].size())];
    for (size_t changes = 1 + below(3); changes > 0; --changes) {
      const std::string other = all["templates"][below(all["templates"].size())];
      const size_t at = below(source.size()), from = below(other.size());
      source.replace(at, below(12), other.substr(from, below(12)));
    }
    std::string error;
    const bool is_text = render(source, all["chats"][below(6)], {}, error).has_value();
    ++(is_text ? texts : refusals);
    EXPECT_TRUE(is_text || error.starts_with("line ") || error.starts_with("more than")) << error;
  }
  EXPECT_GT(texts, 200);
  EXPECT_GT(refusals, 200);
}

}  // namespace
}  // namespace tandem
