// The text a run trains on: files found from folders, globs and single files, split into training
// and held-out documents, read as one stream of byte tokens.
//
// Folders are walked recursively without following links; globs and plain paths are taken as they
// are. The list is sorted and free of duplicates; empty files are left out. A file is held out when
// the XXH3-64 hash of its content, as a fraction of 2^64, is below `heldout`: copies of one text
// fall on the same side, and the split does not depend on names or order.
//
// The stream of the training files is kBos, bytes of file 0, kBos, bytes of file 1, … Large files
// are mapped; small ones are copied into one block, since a process can hold only so many mappings.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/files.h"

namespace tandem {

/// The files that `paths` name. Throws IoError naming a path that does not exist or matches
/// nothing.
std::vector<std::string> find_files(std::span<const std::string> paths);

class Corpus {
 public:
  /// Throws IoError for an unreadable file and ConfigError when no training bytes are left.
  Corpus(std::span<const std::string> paths, double heldout);

  /// Tokens in the training stream, kBos included.
  int64_t tokens() const { return starts_.back(); }
  int64_t bytes() const { return tokens() - int64_t(files_.size()); }
  const std::vector<std::string>& files() const { return files_; }
  const std::vector<std::string>& heldout_files() const { return heldout_; }
  /// Changes when the training stream does.
  const std::string& fingerprint() const { return fingerprint_; }
  /// Tokens [begin, begin + out.size()) of the stream; -1 past its end.
  void read(int64_t begin, std::span<int32_t> out) const;

 private:
  std::vector<std::string> files_, heldout_;
  std::vector<MappedFile> mappings_;
  std::vector<std::byte> block_;
  std::vector<std::span<const std::byte>> documents_;
  std::vector<int64_t> starts_;  ///< of each document's kBos in the stream; then the total
  std::string fingerprint_;
};

}  // namespace tandem
