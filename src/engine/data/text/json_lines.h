// JSON Lines: a document per line.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/data/data_file.h"
#include "engine/data/stream/shared_work.h"
#include "engine/data/tokens/token_source.h"
#include "engine/tokenizer/tokenizer.h"

namespace tandem {

/// Document of a line.
struct LineDocument {
  std::vector<int32_t> tokens;
  uint64_t hash = 0;             ///< XXH3-64 of its text
  std::vector<int64_t> answers;  ///< as TokenSource::scored_spans, from its first token; empty: all
};

/// Documents that lines hold.
class LineFormat {
 public:
  virtual ~LineFormat() = default;
  virtual std::string format() const = 0;  ///< value of data.format
  virtual std::string name() const = 0;    ///< identifies the tokens that a line becomes
  /// Throws InvalidArgument for a line that holds no document, saying why and what is expected.
  virtual LineDocument parse(std::string_view line) const = 0;
  /// Appends the tokens of a line that `parse` accepts. Throws InvalidArgument for another.
  virtual void append(std::string_view line, std::vector<int32_t>& tokens) const = 0;
};

/// {"text": "…"}, or with another key; other keys are ignored.
class TextLines : public LineFormat {
 public:
  explicit TextLines(std::shared_ptr<const Tokenizer> tokenizer, std::string text_key = "text");
  std::string format() const override { return "jsonl"; }
  std::string name() const override { return tokenizer_->name(); }
  LineDocument parse(std::string_view line) const override;
  void append(std::string_view line, std::vector<int32_t>& tokens) const override;

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::string text_key_;
};

/// The tokens of all documents, in the order of the files' paths. A document is held out if the
/// XXH3-64 hash of its text, as a fraction of 2^64, is below `val_fraction`. Reads all of the files
/// once at construction and keeps the positions of the documents, 24 bytes for each, and 16 for
/// each answer; documents are then read from disk and tokenized on demand.
class JsonLines : public TokenSource {
 public:
  /// Throws IoError, on every rank, for a file that cannot be read, naming a line that is not such
  /// a document, and ConfigError if fewer than two tokens are left to train on. Collective over
  /// `world` unless it is nullptr.
  JsonLines(std::span<const std::string> paths, double val_fraction,
            std::shared_ptr<const LineFormat> lines, Communicator* world = nullptr);

  int64_t tokens() const override { return starts_.back(); }
  void read(int64_t begin, std::span<int32_t> out) const override;
  void verify(Communicator* world = nullptr) const override;
  std::span<const int64_t> document_begins() const override { return starts_; }
  int32_t start_token() const override { return start_token_.value_or(-1); }
  std::span<const int64_t> scored_spans() const override { return scored_; }
  std::string format() const override { return lines_->format(); }
  std::string describe() const override;
  std::string identity() const override;

 private:
  struct Document {
    uint64_t offset;  ///< of its line
    uint32_t bytes;   ///< of its line
    uint32_t file;
  };
  using Files = std::vector<std::shared_ptr<DataFile>>;
  JsonLines(Files files, std::shared_ptr<const LineFormat> lines);
  void index(uint32_t file, double val_fraction, JsonLines& held_out, SharedWork& work);
  void add(const Document& position, const LineDocument& document);
  void finish();

  Files files_;
  std::shared_ptr<const LineFormat> lines_;
  std::vector<Document> documents_;
  std::vector<int64_t> starts_{0};  ///< position of each document in the stream, then the total
  std::vector<int64_t> scored_;
  std::optional<int32_t> start_token_;
  std::vector<uint64_t> hashes_;  ///< of the documents, until the fingerprint is known
};

/// Text of a line's document, its value of `key`. Throws InvalidArgument, without the line's place.
std::string parse_json_document(std::string_view line, const std::string& key);
/// Whether the line holds no document.
bool is_blank_line(std::string_view line);

}  // namespace tandem
