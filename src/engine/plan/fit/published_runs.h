// bench/published/runs.csv, embedded into the library by cmake/embed.cmake.
#pragma once

#include <string_view>

namespace tandem {

extern const std::string_view kPublishedRuns;

}  // namespace tandem
