// Files installed with the library, data files in share/tandem of its prefix.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tandem {

/// Folder of the shared library, or of the program that links the static one. Empty if unknown.
std::filesystem::path library_folder();

/// Path of a data file, or "" if not found. Searched below the folder of the library or the program
/// (../share/tandem, ../../share/tandem, share/tandem), then below the prefix the build was
/// configured with.
std::string data_file(std::string_view name);

}  // namespace tandem
