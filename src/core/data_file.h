// Files of data that are installed with the library, in share/tandem of its prefix.
#pragma once

#include <string>
#include <string_view>

namespace tandem {

/// The path of one, or "" where it is not there: below the folder that has the library or the
/// program (../share/tandem, ../../share/tandem, share/tandem), else below the prefix that the
/// build was configured with.
std::string data_file(std::string_view name);

}  // namespace tandem
