// JSON Lines: a document per line, {"text": "…"}, or with another key; other keys are ignored.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/data/data_file.h"
#include "engine/data/shared_work.h"
#include "engine/data/token_source.h"
#include "engine/tokenizer/tokenizer.h"

namespace tandem {

/// The tokens of all documents, in the order of the files' paths. A document is held out if the
/// XXH3-64 hash of its text, as a fraction of 2^64, is below `val_fraction`. Reads all of the files
/// once at construction and keeps the positions of the documents, 24 bytes for each; documents are
/// then read from disk and tokenized on demand.
class JsonLines : public TokenSource {
 public:
  /// Throws IoError, on every rank, for a file that cannot be read, naming a line that is not such
  /// a document, and ConfigError if fewer than two tokens are left to train on. Collective over
  /// `world` unless it is nullptr.
  JsonLines(std::span<const std::string> paths, double val_fraction,
            std::shared_ptr<const Tokenizer> tokenizer, Communicator* world = nullptr,
            const std::string& text_key = "text");

  int64_t tokens() const override { return starts_.back(); }
  void read(int64_t begin, std::span<int32_t> out) const override;
  void verify(Communicator* world = nullptr) const override;
  std::span<const int64_t> document_begins() const override { return starts_; }
  int32_t start_token() const override { return start_token_.value_or(-1); }
  std::string format() const override { return "jsonl"; }
  std::string describe() const override;
  std::string identity() const override;

 private:
  struct Document {
    uint64_t offset;  ///< of its line
    uint32_t bytes;   ///< of its line
    uint32_t file;
  };
  using Files = std::vector<std::shared_ptr<DataFile>>;
  JsonLines(Files files, std::shared_ptr<const Tokenizer> tokenizer, std::string text_key);
  void index(uint32_t file, double val_fraction, JsonLines& held_out, SharedWork& work);
  void add(const Document& document, uint64_t hash, std::span<const int32_t> tokens);
  void finish();

  Files files_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::string text_key_;
  std::vector<Document> documents_;
  std::vector<int64_t> starts_{0};  ///< position of each document in the stream, then the total
  std::optional<int32_t> start_token_;
  std::vector<uint64_t> hashes_;  ///< of the documents, until the fingerprint is known
};

/// Text of a line's document, its value of `key`. Throws InvalidArgument, without the line's place.
std::string parse_json_document(std::string_view line, const std::string& key);
/// Whether the line holds no document.
bool is_blank_line(std::string_view line);

}  // namespace tandem
