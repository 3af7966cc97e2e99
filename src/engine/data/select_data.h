// Selection of the files that an entry of data.paths names, and their format.
#pragma once

#include <string>
#include <vector>

namespace tandem {

struct SelectedData {
  std::string format;              ///< value of data.format other than "auto"
  std::vector<std::string> files;  ///< sorted, without duplicates
  std::vector<std::string> notes;  ///< what was left out, one line each
};

/// Selects the files of `paths`: files, folders, patterns, or paths of a .bin and .idx without
/// their ending. With `format` "auto" they must be of one format; beside token files and JSON
/// Lines, files that accompany data are left out. Another format selects the files of a folder that
/// have it, and takes files that `paths` name as they are. Throws IoError for paths that do not
/// exist, and ConfigError for files in formats that are not read, files of several formats, and
/// none.
SelectedData select_data(std::vector<std::string> paths, const std::string& format,
                         const std::string& text_key);

}  // namespace tandem
