// Files of text as tokens. A text is tokenized in blocks of about 8 KiB, each on its own, so that a
// window of tokens needs little of it: blocks end after a line that no white space follows, where
// words end, or else, without such a line for 64 KiB, after any character.
//
// A file is a document, or several with a separator between them, which is no text itself. Empty
// ones are left out.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/data/data_file.h"
#include "engine/data/stream/shared_work.h"
#include "engine/data/tokens/token_source.h"
#include "engine/tokenizer/tokenizer.h"

namespace tandem {

/// The tokens of all documents, in the order of the files' paths, each after the tokenizer's
/// separator. A document is held out if its hash, as a fraction of 2^64, is below `val_fraction`:
/// of its text, or of the samples of its file. Tokenizes all files once at construction and keeps
/// the positions of blocks, 24 bytes for each; blocks are then read from disk and tokenized on
/// demand.
class TokenizedText : public TokenSource {
 public:
  /// `separator`: empty for a document a file. Throws IoError, on every rank, for a file that
  /// cannot be read, and ConfigError if fewer than two tokens are left to train on. Collective over
  /// `world` unless it is nullptr.
  TokenizedText(std::span<const std::string> paths, double val_fraction,
                std::shared_ptr<const Tokenizer> tokenizer, Communicator* world = nullptr,
                const std::string& separator = "");

  int64_t tokens() const override { return starts_.back(); }
  void read(int64_t begin, std::span<int32_t> out) const override;
  void verify(Communicator* world = nullptr) const override;
  std::span<const int64_t> document_begins() const override { return document_begins_; }
  int32_t start_token() const override { return start_token_; }
  std::string format() const override { return "text"; }
  std::string describe() const override;
  std::string identity() const override;

 private:
  struct Block {
    uint64_t offset;
    uint32_t bytes;
    uint32_t file : 31;
    uint32_t begins : 1;  ///< a document
  };
  using Files = std::vector<std::shared_ptr<DataFile>>;
  TokenizedText(Files files, std::shared_ptr<const Tokenizer> tokenizer);
  void index_document(uint32_t file, uint64_t begin, uint64_t end, uint64_t hash, SharedWork& work);
  void tokenize(const Block& block, std::string_view text, std::vector<int32_t>& tokens) const;
  void finish();

  Files files_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::vector<Block> blocks_;
  std::vector<int64_t> starts_{0};        ///< position of each block in the stream, then the total
  std::vector<int64_t> document_begins_;  ///< then the total
  int32_t start_token_ = -1;
  std::vector<uint64_t> hashes_;  ///< of the documents in the stream
};

/// Bytes of a text that decide on its first block.
inline constexpr size_t kTextWindow = (size_t(64) << 10) + 1;
/// Bytes of the first block of `text`, which holds more than 64 KiB unless it `is_end`, the end of
/// its document.
size_t text_block(std::string_view text, bool is_end);

}  // namespace tandem
