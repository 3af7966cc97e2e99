// Standard input.
#pragma once

#include <cstddef>
#include <string>

namespace tandem {

/// Reads all of standard input; `option` names it in messages. Throws InvalidArgument for more than
/// `max_mib`.
std::string read_input(const std::string& option, size_t max_mib);

}  // namespace tandem
