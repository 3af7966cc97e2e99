// Entries of data.paths: a path, or a weight and a path, "0.7 PATH".
#pragma once

#include <string>
#include <vector>

namespace tandem {

struct WeightedPath {
  double weight = 0;  ///< 0: the entry has none
  std::string path;
};

/// An entry is weighted if it begins with a number and a space. A path of that form can be given as
/// "./2024 texts".
WeightedPath parse_weighted_path(const std::string& entry);
/// The entry with its path, if relative, taken to be relative to `folder`.
std::string make_relative_to(const std::string& entry, const std::string& folder);
/// Throws ConfigError for a weight that is not above 0, and if only some entries have one. `key`
/// names them.
void check_weights(const std::vector<std::string>& entries, const std::string& key);

}  // namespace tandem
