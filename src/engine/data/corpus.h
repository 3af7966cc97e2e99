// The text a run trains on: files found from folders, globs and single files, split into training
// and held-out documents, read as one stream of byte tokens.
//
// Folders are walked recursively without following links, which are reported; globs and plain paths
// are taken as they are. The list is sorted and free of duplicates; empty files are left out. A
// file is held out when the XXH3-64 hash of its content, as a fraction of 2^64, is below `heldout`:
// copies of one text fall on the same side, and the split does not depend on names or order.
//
// The stream of the training files is kBos, bytes of file 0, kBos, bytes of file 1, … Small
// files are copied into one block; large ones are read where they lie, as long as the process may
// open files.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/data/shared_work.h"
#include "engine/data/text_file.h"
#include "tandem/communicator.h"

namespace tandem {

struct FoundFiles {
  std::vector<std::string> files;
  std::vector<std::string> skipped;  ///< links and special files inside folders
};
/// The files that `paths` name. Throws IoError naming a path that does not exist, matches nothing
/// or is neither a file nor a folder.
FoundFiles find_files(std::span<const std::string> paths);
/// "left out 3 links or special files in folders (DIR/LINK, ...)"; empty when there are none.
std::string describe_skipped(const FoundFiles& found);

/// A path per line; where a name has a newline in it, each ends with a NUL instead.
std::string list_of_paths(std::span<const std::string> paths);
/// Reads both forms, as `find -print` and `find -print0` write them.
std::vector<std::string> paths_of_list(std::string_view list);

class Corpus {
 public:
  /// Collective over `world` where it is not nullptr: ranks that see the same files read each large
  /// one once between them. Throws IoError for an unreadable file, on every rank, and ConfigError
  /// when no training bytes are left.
  Corpus(std::span<const std::string> paths, double heldout, Communicator* world = nullptr);

  /// Tokens in the training stream, kBos included.
  int64_t tokens() const { return starts_.back(); }
  int64_t bytes() const { return tokens() - int64_t(files_.size()); }
  const std::vector<std::string>& files() const { return files_; }
  const std::vector<std::string>& heldout_files() const { return heldout_; }
  const std::vector<int64_t>& heldout_sizes() const { return heldout_sizes_; }
  /// Number, bytes and a hash of the held-out files. Changes when their text does.
  std::string describe_heldout() const;
  /// What was found in data.paths and is no text, one line each.
  const std::vector<std::string>& remarks() const { return remarks_; }
  /// Changes when the training stream does.
  const std::string& fingerprint() const { return fingerprint_; }
  /// Tokens [begin, begin + out.size()) of the stream; -1 past its end. Throws IoError naming a
  /// file that cannot be read or is no longer what it was.
  void read(int64_t begin, std::span<int32_t> out) const;
  /// Collective over `world`, likewise. Throws IoError naming a file that is no longer what it was.
  /// Reads all of them.
  void verify(Communicator* world = nullptr) const;

 private:
  struct Document {
    std::string path;
    size_t size = 0;
    size_t offset = 0;  ///< in block_, without a file
    uint64_t hash = 0;
    std::unique_ptr<TextFile> file;
  };
  Document open_document(const std::string& path, double heldout);
  std::vector<Document> open_documents(const std::vector<std::string>& paths, double heldout,
                                       SharedWork& work);
  static void hash_open_files(std::vector<Document>& documents, Communicator* world);
  void read(const Document& document, size_t offset, std::span<int32_t> out) const;

  std::vector<std::string> files_, heldout_, empty_, remarks_;
  std::vector<std::byte> block_;
  std::vector<Document> documents_;
  std::vector<uint64_t> hashes_, heldout_hashes_;
  std::vector<int64_t> heldout_sizes_;
  size_t open_files_ = 0;
  std::vector<int64_t> starts_;  ///< of each document's kBos in the stream; then the total
  std::string fingerprint_;
};

}  // namespace tandem
