// Text of a training run: files found from folders, globs and single files, split into training and
// held-out documents, read as one stream of byte tokens.
//
// Folders are walked recursively without following links, which are reported; globs and plain paths
// are used as given. The list is sorted, without duplicates and empty files. A file is held out if
// the XXH3-64 hash of its content, as a fraction of 2^64, is below `val_fraction`: copies of one
// text are in the same split, which does not depend on names or order.
//
// The stream of the training files is kBos, bytes of file 0, kBos, bytes of file 1, … Small files
// are copied into one block; large ones are read from disk, up to a limit of open files.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/data/open_contents.h"
#include "engine/data/stream/shared_work.h"
#include "engine/data/text/text_file.h"
#include "engine/data/tokens/token_source.h"
#include "engine/model/config.h"
#include "tandem/communicator.h"

namespace tandem {

/// File that each training run writes into its folder.
constexpr const char* kRunId = "/run_id";

struct FoundFiles {
  std::vector<std::string> files;
  std::vector<std::string> skipped;     ///< links and special files inside folders
  std::vector<std::string> hidden;      ///< files and folders inside folders, named ".NAME"
  std::vector<std::string> runs;        ///< folders inside folders that hold kRunId
  std::vector<std::string> in_folders;  ///< of `files`, sorted: those that are not named themselves
};
/// Files named by `paths`. Throws IoError naming a path that does not exist, matches nothing or is
/// neither a file nor a folder.
FoundFiles find_files(std::span<const std::string> paths);
/// "left out 3 hidden files or folders (DIR/.git, ...)", a line a kind.
std::vector<std::string> describe_left_out(const FoundFiles& found);

/// One path per line; if lines would not keep a name, NUL-terminated paths instead.
std::string join_paths(std::span<const std::string> paths);
/// Reads both forms, as written by `find -print` and `find -print0`; lines also as editors save
/// them, with a byte order mark and CRLF.
std::vector<std::string> split_paths(std::string_view list);

class Corpus : public TokenSource {
 public:
  /// Reads the text; ranks that see the same files divide the reading of large ones among them.
  /// Those with a record in `known` that still applies are not read. Throws IoError for an
  /// unreadable file, on every rank, and ConfigError if no training bytes remain. Collective over
  /// `world` unless it is nullptr.
  Corpus(std::span<const std::string> paths, double val_fraction, Communicator* world = nullptr,
         const Manifest& known = {});

  int64_t tokens() const override { return starts_.back(); }
  int64_t bytes() const { return tokens() - int64_t(files_.size()); }
  const std::vector<std::string>& files() const { return files_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  /// Content of each file that is compressed; nullptr for others.
  std::vector<std::shared_ptr<DataFile>> contents() const;
  void read(int64_t begin, std::span<int32_t> out) const override;
  /// Begins of the files.
  std::span<const int64_t> document_begins() const override { return starts_; }
  int32_t start_token() const override { return kBos; }
  /// Reads all files.
  void verify(Communicator* world = nullptr) const override;
  std::string format() const override { return "text"; }
  std::string describe() const override;
  std::string identity() const override;

 private:
  struct Document {
    std::string path;
    size_t size = 0;
    size_t offset = 0;  ///< in block_, for documents without a file
    uint64_t hash = 0;
    std::unique_ptr<TextFile> file;
    std::shared_ptr<DataFile> content;  ///< of a compressed file
    std::optional<FileRecord> record;   ///< of a file that is no sampled one
  };
  Document open_document(const std::string& path, const std::shared_ptr<DataFile>& content,
                         double val_fraction);
  std::vector<Document> open_documents(const std::vector<std::string>& paths,
                                       const DataFiles& contents, double val_fraction,
                                       SharedWork& work);
  void hash_open_files(std::vector<Document>& documents, Communicator* world,
                       const Manifest& known);
  void read(const Document& document, size_t offset, std::span<int32_t> out) const;

  std::vector<std::string> files_, empty_;
  std::vector<std::byte> block_;
  std::vector<Document> documents_;
  std::vector<uint64_t> hashes_;
  std::vector<int64_t> sizes_;
  size_t open_files_ = 0;
  std::vector<int64_t> starts_;  ///< position of each document's kBos in the stream, then the total
};

}  // namespace tandem
