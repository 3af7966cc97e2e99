// Command line of this process.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace tandem {

/// Words of this process's command line.
std::vector<std::string> typed_words();
/// Words joined into one string, quoted if needed.
std::string joined(std::span<const std::string> words);

}  // namespace tandem
