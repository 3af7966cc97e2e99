#include "engine/serve/request_fields.h"

#include <algorithm>
#include <span>

#include "engine/serve/request_json.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;
using Names = std::span<const std::string_view>;

/// Fields other than those of a request (engine/infer/request.h).
constexpr std::string_view kFields[] = {"model",
                                        "include_stop_str_in_output",
                                        "stream",
                                        "stream_options",
                                        "n",
                                        "logprobs",
                                        "prompt_logprobs",
                                        "ignore_eos"};
constexpr std::string_view kTextFields[] = {"prompt", "echo", "best_of"};
constexpr std::string_view kChatFields[] = {"messages",
                                            "max_completion_tokens",
                                            "top_logprobs",
                                            "tools",
                                            "tool_choice",
                                            "functions",
                                            "function_call",
                                            "parallel_tool_calls",
                                            "add_generation_prompt",
                                            "continue_final_message",
                                            "chat_template_kwargs",
                                            "reasoning_effort",
                                            "documents"};

/// Fields that change no text, whatever their value: notes of clients, and hints for speed.
constexpr std::string_view kNotes[] = {"user",
                                       "metadata",
                                       "store",
                                       "service_tier",
                                       "prompt_cache_key",
                                       "prompt_cache_retention",
                                       "safety_identifier",
                                       "cache_prompt",
                                       "cache_salt",
                                       "request_id",
                                       "priority",
                                       "prediction",
                                       "spaces_between_special_tokens",
                                       "id_slot"};

/// Field that is understood with one value, that which changes nothing.
struct NeutralField {
  std::string_view name, value;  ///< value: as JSON
};
constexpr NeutralField kNeutral[] = {{"min_tokens", "0"},
                                     {"length_penalty", "1"},
                                     {"use_beam_search", "false"},
                                     {"early_stopping", "false"},
                                     {"detokenize", "true"},
                                     {"return_token_ids", "false"},
                                     {"return_tokens_as_token_ids", "false"},
                                     {"bad_words", "[]"},
                                     {"typical_p", "1"},
                                     {"tfs_z", "1"},
                                     {"mirostat", "0"},
                                     {"repeat_penalty", "1"},
                                     {"response_format", R"({"type":"text"})"}};
constexpr NeutralField kNeutralText[] = {{"add_special_tokens", "true"}};
constexpr NeutralField kNeutralChat[] = {{"add_special_tokens", "false"},
                                         {"echo", "false"},
                                         {"modalities", R"(["text"])"},
                                         {"include_reasoning", "true"},
                                         {"verbosity", R"("medium")"}};

bool is_one_of(Names names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

/// Whether `name` is a field with one value; throws if it has another.
bool is_neutral(std::span<const NeutralField> fields, std::string_view name, const Json& value) {
  const auto found = std::ranges::find(fields, name, &NeutralField::name);
  if (found == fields.end()) return false;
  if (value != Json::parse(found->value)) {
    reject(name, value, fmt::format("{} (nothing else is supported)", found->value));
  }
  return true;
}

}  // namespace

void reject(std::string_view name, const Json& value, std::string_view expected) {
  throw ApiError(400, fmt::format("{} = {}: expected {}", name, printable(value.dump()), expected),
                 std::string(name));
}

void check_fields(const Json& root, bool is_chat) {
  for (const auto& [name, value] : root.items()) {
    if (value.is_null() || is_client_field(name) || is_one_of(kFields, name)) continue;
    if (is_one_of(kNotes, name)) continue;
    if (is_one_of(is_chat ? Names(kChatFields) : Names(kTextFields), name)) continue;
    if (is_neutral(kNeutral, name, value)) continue;
    if (is_chat ? is_neutral(kNeutralChat, name, value) : is_neutral(kNeutralText, name, value)) {
      continue;
    }
    throw ApiError(400, fmt::format("{}: unknown field", printable(name)), printable(name));
  }
}

}  // namespace tandem
