// Page to try a served model, embedded into the library by cmake/embed.cmake.
#pragma once

#include <string_view>

namespace tandem {

extern const std::string_view kServePage;

}  // namespace tandem
