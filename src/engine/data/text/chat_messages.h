// Chats of data sets as messages that templates take.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace tandem {

/// Object with `messages`, each with a role and content, and `tools` if the line has some. The
/// line is a JSON object in one of three forms; its other keys are ignored:
/// - {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
/// - {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}
/// - {"instruction": "…", "input": "…", "output": "…"}, of which `input` may be missing or empty
/// The last two may have `system`. Throws ConfigError for another, or an unknown role.
nlohmann::ordered_json parse_chat(std::string_view line);
/// Whether the line is a JSON object with a key of a form above, and without `text`.
bool is_chat_line(std::string_view line);

}  // namespace tandem
