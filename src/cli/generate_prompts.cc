#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "cli/generate.h"
#include "cli/text_model.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/printable.h"
#include "engine/model/config_value.h"
#include "engine/serve/chat_request.h"
#include "engine/serve/prompt_tokens.h"
#include "engine/serve/request_fields.h"
#include "engine/serve/request_json.h"
#include "engine/serve/tool_calls.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

using Json = nlohmann::ordered_json;

/// Keys of a line beside the fields of a request (engine/infer/request.h).
constexpr std::string_view kLineKeys[] = {"prompt",        "messages", "log_probs",
                                          "top_log_probs", "tools",    "tool_choice"};

void check_keys(const Json& line, const std::string& where) {
  for (const auto& [key, value] : line.items()) {
    if (is_client_field(key) || std::ranges::find(kLineKeys, key) != std::end(kLineKeys)) continue;
    throw ConfigError(fmt::format("{}: {}: expected one of {}, {}", where, printable(key),
                                  fmt::join(kLineKeys, ", "), fmt::join(client_fields(), ", ")));
  }
}

/// `where`: file and line, for messages. `chat`: the model's template once a line needed it.
PromptLine parse_line(const std::string& text, const std::string& where,
                      const GenerateArguments& arguments, const StoredModel& stored,
                      std::optional<ChatTemplate>& chat) {
  const Json root = parse_json<Json>(text);
  if (root.is_discarded()) {
    throw ConfigError(fmt::format("{}: {}: expected a JSON object", where, json_error(text)));
  }
  if (!root.is_object()) throw ConfigError(where + ": expected a JSON object");
  check_keys(root, where);
  PromptLine line;
  Request& request = line.request;
  if (root.contains("messages") && !root.contains("prompt")) {
    try {
      if (!chat) chat = open_chat_template(stored);
      const ChatTools tools = parse_tools(root);
      request.prompt = make_chat_prompt(stored, render_chat(*chat, root, tools));
      line.tools = tools.names;
      if (!line.tools.empty()) request.shown = call_marker_tokens(stored);
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("{}: {}", where, error.what()));
    } catch (const ApiError& error) {
      throw ConfigError(fmt::format("{}: {}", where, error.what()));
    }
  } else {
    if (!root.contains("prompt") || root.contains("messages")) {
      throw ConfigError(where + ": expected a prompt, a string, or messages, a list");
    }
    const auto prompt = parse_value<std::string>(root["prompt"], "prompt", where);
    request.prompt = make_prompt(stored, prompt);
    request.has_text_before = !prompt.empty();
  }
  request.eos_token_ids = arguments.eos_token_ids;
  request.stops = arguments.stops;
  request.sampling = arguments.sampling;
  request.rules = arguments.rules;
  request.max_tokens = arguments.max_tokens;
  take_client_fields(root, request,
                     [&](const char* name, const Json& value, const std::string& expected) {
                       reject_value(where, name, value, expected);
                     });
  const auto take = [&]<typename T>(const char* key, T& value) {
    if (has(root, key)) value = parse_value<T>(root[key], key, where);
  };
  take("log_probs", line.wants_log_probs);
  take("top_log_probs", request.alternatives);
  if (request.alternatives < 0 || request.alternatives > kMaxAlternatives) {
    reject_value(where, "top_log_probs", root["top_log_probs"],
                 fmt::format("0 to {}", kMaxAlternatives));
  }
  try {
    check(request, stored.config, stored.config.max_seq);
  } catch (const InvalidArgument& error) {
    throw ConfigError(fmt::format("{}: {}", where, error.what()));
  }
  return line;
}

/// Text of a request so far.
struct PromptText {
  std::string text;
  std::vector<int32_t> tokens;
  std::vector<double> log_probs;
  std::vector<std::vector<Sampled>> alternatives;
  std::optional<TokenEvent> last;
};

std::string to_json(const PromptLine& line, const PromptText& written) {
  const TokenEvent& last = *written.last;
  std::string text = written.text;
  std::vector<ToolCall> calls;
  if (!line.tools.empty()) {
    ToolCallReader reader(line.tools);
    text = reader.add(written.text);
    text += reader.rest();
    calls = reader.take();
  }
  Json root{{"text", text},
            {"ended_by", name_of(*last.finish)},
            {"prompt_tokens", line.request.prompt.size()},
            {"tokens", written.tokens.size()},
            {"token_ids", written.tokens}};
  if (!last.stop.empty()) root["stop"] = last.stop;
  for (const ToolCall& call : calls) {
    const Json function{{"name", call.name}, {"arguments", call.arguments}};
    root["tool_calls"].push_back({{"type", "function"}, {"function", function}});
  }
  if (line.wants_log_probs) root["log_probs"] = written.log_probs;
  if (line.request.alternatives > 0) {
    Json& all = root["top_log_probs"] = Json::array();
    for (const std::vector<Sampled>& alternatives : written.alternatives) {
      Json tokens = Json::array();
      for (const auto& [token, log_prob] : alternatives) tokens.push_back({token, log_prob});
      all.push_back(std::move(tokens));
    }
  }
  return dump_json(root) + "\n";
}

/// Options of an engine that all requests fit.
EngineOptions engine_options(const GenerateArguments& arguments, const StoredModel& stored,
                             const std::vector<PromptLine>& lines) {
  int64_t capacity = 1;
  for (const PromptLine& line : lines) {
    const auto prompt = int64_t(line.request.prompt.size());
    const int64_t room = stored.config.max_seq - prompt;
    capacity = std::max(capacity, prompt + std::min(room, line.request.max_tokens));
  }
  EngineOptions options;
  options.dtype = parse_dtype(arguments.dtype);
  options.capacity = capacity;
  options.sequences = std::clamp<int64_t>(int64_t(lines.size()), 1, arguments.batch);
  set_step_rows(options, prompt_rows(arguments.prompt_rows, arguments.devices),
                arguments.devices.on_gpus());
  options.codec = arguments.policy;
  options.batch_invariant = arguments.batch_invariant;
  options.weights = parse_weight_format(arguments.weights);
  options.tokenizer = stored.tokenizer.get();
  return options;
}

}  // namespace

PromptFile read_prompts(const GenerateArguments& arguments, const StoredModel& stored) {
  const std::string text = read_file(arguments.prompts);
  PromptFile file{content_hash(text), {}};
  std::optional<ChatTemplate> chat;
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    file.lines.push_back(
        parse_line(line, fmt::format("{}:{}", arguments.prompts, number), arguments, stored, chat));
  }
  return file;
}

void generate_all(Communicator& tp, const GenerateArguments& arguments, const StoredModel& stored,
                  const std::vector<PromptLine>& lines) {
  Engine engine(tp, stored.config, engine_options(arguments, stored, lines));
  const LoadedWeights loaded = load_weights(tp, stored, engine);
  const auto begin = std::chrono::steady_clock::now();
  for (const PromptLine& line : lines) engine.submit(line.request);
  std::vector<PromptText> texts(lines.size());
  size_t num_written = 0, tokens = 0;
  while (!engine.is_idle()) {
    for (TokenEvent& event : engine.step()) {
      if (event.finish == Finish::failed) throw InvalidArgument(event.error);
      PromptText& text = texts[size_t(event.request)];
      text.text += event.text;
      ++tokens;
      if (event.finish != Finish::end_token) {
        text.tokens.push_back(event.token);
        text.log_probs.push_back(event.log_prob);
        text.alternatives.push_back(std::move(event.alternatives));
      }
      if (event.finish) text.last = std::move(event);
    }
    std::string output;
    for (; num_written < lines.size() && texts[num_written].last; ++num_written) {
      output += to_json(lines[num_written], texts[num_written]);
      texts[num_written].text = {};
    }
    if (tp.rank() == 0 && !output.empty()) put(output);
  }
  if (tp.rank() != 0) return;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const Engine::Stats& stats = engine.stats();
  complain(describe(loaded));
  complain(fmt::format(
      "{} texts, {} tokens in {:.3f} s ({:.1f} tokens/s): {} steps of {:.1f} rows, {} pages; {} "
      "texts computed again for lack of pages",
      lines.size(), tokens, took.count(), double(tokens) / took.count(), stats.steps,
      double(stats.rows) / double(std::max<int64_t>(1, stats.steps)), engine.num_pages(),
      stats.preempted));
}

}  // namespace tandem::cli
