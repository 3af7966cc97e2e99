// Data files installed with the library, in share/tandem of its prefix.
#pragma once

#include <string>
#include <string_view>

namespace tandem {

/// Path of a data file, or "" if not found. Searched below the folder of the library or the program
/// (../share/tandem, ../../share/tandem, share/tandem), then below the prefix the build was
/// configured with.
std::string data_file(std::string_view name);

}  // namespace tandem
