// Training data as a stream of tokens, whatever files it comes from.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/data/manifest.h"
#include "tandem/communicator.h"

namespace tandem {

class TokenSource;
class ShardStream;

/// Data kept out of training: files of text, each scored separately, or a stream of tokens.
struct HeldOut {
  std::vector<std::string> files;
  std::vector<int64_t> sizes;                       ///< bytes of each file's content
  std::vector<std::shared_ptr<DataFile>> contents;  ///< of compressed files; nullptr for others
  std::shared_ptr<const TokenSource> stream;        ///< nullptr: none
  std::string identity;                             ///< changes if the data do
  bool empty() const { return files.empty() && !stream; }
};

/// Source in a blend, with its share of the samples.
struct WeightedSource {
  const TokenSource* source;
  double weight;
};

/// Every token is in [0, vocabulary of the model). Reading is thread-safe.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  /// Tokens in the training stream.
  virtual int64_t tokens() const = 0;
  /// Reads tokens [begin, begin + out.size()) of the stream; -1 past its end. Throws IoError naming
  /// a file that cannot be read, has changed, or holds a token outside of the vocabulary.
  virtual void read(int64_t begin, std::span<int32_t> out) const = 0;
  /// Throws IoError naming a file that has changed. Collective over `world` unless it is nullptr.
  virtual void verify(Communicator* world = nullptr) const = 0;
  /// Value of data.format that opens it, other than "auto".
  virtual std::string format() const = 0;
  /// "19 files, 1.2 MB of text, 2 files held out"
  virtual std::string describe() const = 0;
  /// Number, size and hash of the files, compared between ranks.
  virtual std::string identity() const = 0;
  /// Sources of a blend; a source that is none consists of itself.
  virtual std::vector<WeightedSource> components() const { return {{this, 1}}; }

  /// Positions in the stream at which its documents begin, in order, then the end of the last one;
  /// empty if the source does not know. Throws IoError for an index that cannot be read; then every
  /// time.
  virtual std::span<const int64_t> document_begins() const { return {}; }
  /// Token that documents begin with, so that it also ends the one before; -1: none.
  virtual int32_t start_token() const { return -1; }
  /// Begins of documents whose token is not start_token(), so that nothing predicts it.
  virtual std::span<const int64_t> unpredicted_begins() const {
    return start_token() < 0 ? document_begins() : std::span<const int64_t>();
  }
  /// Spans of the stream that loss is taken on, in order: the begin of one, its end, the begin of
  /// the next … Empty: all of it.
  virtual std::span<const int64_t> scored_spans() const { return {}; }

  /// Itself if it is a stream of shards, whose tokens() are not known: it has its own order.
  virtual const ShardStream* stream() const { return nullptr; }
  /// Called in idle time: reads some of what follows the last tokens read. Returns whether there
  /// is more to do.
  virtual bool read_ahead() const { return false; }

  /// Hash of the training stream, equal if the tokens are.
  const std::string& fingerprint() const { return fingerprint_; }
  /// Notes on skipped entries of data.paths, one line each.
  const std::vector<std::string>& notes() const { return notes_; }
  void add_notes(std::span<const std::string> notes) {
    notes_.insert(notes_.end(), notes.begin(), notes.end());
  }
  const HeldOut& held_out() const { return held_out_; }
  /// Records of large files, for a later run's manifest.
  const std::vector<FileRecord>& records() const { return records_; }
  /// Makes the fingerprint that of the same tokens in other samples.
  void identify(const std::string& samples);
  /// Replaces what was kept out of training, which is none, by a separate set.
  void validate_on(HeldOut set) { held_out_ = std::move(set); }

 protected:
  std::string fingerprint_;
  std::vector<std::string> notes_;
  HeldOut held_out_;
  std::vector<FileRecord> records_;
};

}  // namespace tandem
