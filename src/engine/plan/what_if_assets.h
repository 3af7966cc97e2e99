// Parts of the planner's page, embedded into the library by cmake/embed.cmake.
#pragma once

#include <string_view>

namespace tandem {

extern const std::string_view kWhatIfHtml, kWhatIfStyle, kWhatIfModel, kWhatIfScript;

}  // namespace tandem
