// Parts of the server's page, embedded into the library by cmake/embed.cmake.
#pragma once

#include <string_view>

namespace tandem {

extern const std::string_view kServeHtml, kServeStyle, kServeMarkdown, kServeScript;

}  // namespace tandem
