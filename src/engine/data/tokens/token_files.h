// Token files that another program wrote: Megatron-LM's .bin with .idx, .npy, and .bin of uint16
// tokens as nanoGPT writes them. Each is read from disk on demand.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "engine/data/data_file.h"
#include "engine/data/tokens/token_layout.h"
#include "engine/data/tokens/token_source.h"

namespace tandem {

/// One file. Thread-safe.
class TokenFile {
 public:
  /// Reads the header and samples of the content. `separator`: token between documents, at which
  /// the held-out tokens begin or after which, as in the file's first ones; -1: none. Throws
  /// IoError naming a damaged header, or a token that is not below `vocab`.
  TokenFile(const std::string& path, double val_fraction, int64_t vocab, bool stays_open,
            int32_t separator = -1);
  const std::string& path() const { return file_.path(); }
  const TokenLayout& layout() const { return layout_; }
  uint64_t hash() const { return file_.hash(); }
  FileRecord record() const { return make_record(file_); }
  /// Reads tokens of the file. Throws IoError as TokenSource::read.
  void read(int64_t begin, std::span<int32_t> out) const;
  void verify() const { file_.verify(); }

 private:
  void cut_at_separator(int32_t separator);
  void widen(int64_t begin, std::span<const std::byte> bytes, std::span<int32_t> out) const;

  TokenLayout layout_;
  int64_t vocab_;
  DataFile file_;
};

/// Consecutive tokens of a file.
struct TokenRange {
  std::shared_ptr<const TokenFile> file;
  int64_t begin = 0, count = 0;
};

/// Tokens of all files, in the order of their paths, without what is held out: the last
/// `val_fraction` of each file, by documents if it has an index or separators. Nothing is put
/// between files. With a separator a document begins at each of these tokens, whether a program has
/// written them before documents or after; indices are not used.
class TokenFiles : public TokenSource {
 public:
  /// `paths`: files ending in .bin or .npy; `known`: their records. Throws IoError, on every rank,
  /// for a file that cannot be read or trusted, and ConfigError if fewer than two tokens are left
  /// to train on. Collective over `world` unless it is nullptr.
  TokenFiles(std::span<const std::string> paths, double val_fraction, int64_t vocab,
             Communicator* world = nullptr, const Manifest& known = {}, int32_t separator = -1);
  /// Stream of these ranges.
  explicit TokenFiles(std::vector<TokenRange> ranges, int32_t separator = -1);

  int64_t tokens() const override { return starts_.back(); }
  void read(int64_t begin, std::span<int32_t> out) const override;
  void verify(Communicator* world = nullptr) const override;
  /// Begins by the files' indices, or by separators, for which the first call reads all tokens, 8
  /// bytes each. Empty if a file has none.
  std::span<const int64_t> document_begins() const override;
  std::span<const int64_t> unpredicted_begins() const override;
  int32_t start_token() const override { return separator_; }
  std::string format() const override { return "tokens"; }
  std::string describe() const override;
  std::string identity() const override;

 private:
  void read_document_begins() const;
  void read_index_documents() const;
  void read_separated_documents() const;
  void set_ranges(std::vector<TokenRange> ranges);

  std::vector<TokenRange> ranges_;
  std::vector<int64_t> starts_;  ///< position of each range in the stream, then the total
  int64_t documents_ = 0;
  int32_t separator_ = -1;
  mutable std::once_flag once_;
  mutable std::vector<int64_t> document_begins_, unpredicted_begins_;
};

/// The .bin and .npy files among `paths`, and those of the indices, sorted. Throws IoError for a
/// file of another kind, and an index without its file.
std::vector<std::string> find_token_files(std::span<const std::string> paths);
/// Whether `path` names nothing, but is a .bin file's with an index, without its ending.
bool is_token_prefix(const std::string& path);

}  // namespace tandem
