// Messages and functions of a chat's request as its model's template takes them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/serve/completion_request.h"

namespace tandem {

/// Functions that a chat may call: `tools`, or `functions` as older clients name them.
struct ChatTools {
  nlohmann::ordered_json list = nullptr;  ///< as `tools`; null if none may be called
  std::vector<std::string> names = {};    ///< of the functions
  bool are_functions = false;             ///< given as `functions`, and called as such
};
/// Throws ApiError.
ChatTools parse_tools(const nlohmann::ordered_json& root);

/// The prompt's text. Content that is a list of blocks reaches a template that loops over it as a
/// list, others as one text, with line breaks between the blocks; a template that does nothing else
/// gets all content as lists. Throws ApiError.
std::string render_chat(const ChatTemplate& form, const nlohmann::ordered_json& root,
                        const ChatTools& tools);

}  // namespace tandem
