// Stream of shards: the tokens of many files, one epoch after the other, each in an order of the
// files that the seed and the epoch decide. A shard is opened when it is reached.
//
// Window w holds tokens [w * seq, w * seq + seq) of the stream and as targets the token after each:
// shards and epochs follow one another without a gap, so that every window is full and its place is
// a function of its number. Sample i is a window of its block of `shuffle_windows` consecutive
// ones, which are permuted by the seed and the block's number (Sampler). So the order depends on
// neither ranks nor resumes.
//
// Tokens are counted as they are read. To find token p the stream is read from the last known
// StreamCursor before it, at worst from the begin; cursors only save time. A run's ledger has them,
// and a stream records some of those that it reaches.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "engine/data/stream/stream_cursor.h"
#include "engine/data/stream/stream_shards.h"
#include "engine/data/tokens/token_source.h"

namespace tandem {

struct StreamOptions {
  uint64_t seed = 0;
  int64_t shuffle_windows = 1;
  int64_t retained_tokens = 0;  ///< that stay in memory behind the last ones requested
  int64_t ahead_tokens = 0;     ///< that `read_ahead` reads after them
};

/// Tokens to retain so that no shard is read twice while ranks are up to a batch apart: the first
/// sample of a batch needs the begin of its block, when the last one of the batch after it may have
/// been at the end of its block.
constexpr int64_t retained_stream_tokens(int64_t block_tokens, int64_t batch_tokens) {
  return 2 * (block_tokens + batch_tokens);
}

/// Index of the file that is read as number `index` of the epoch.
int64_t shard_at(uint64_t seed, int64_t epoch, int64_t shards, int64_t index);

class ShardStream : public TokenSource {
 public:
  /// Lists the files, without opening one. Throws IoError, on every rank, for one that is gone, and
  /// ConfigError if all are empty. Collective over `world` unless it is nullptr.
  ShardStream(std::span<const std::string> paths, ShardFormat format, StreamOptions options,
              Communicator* world = nullptr, Manifest known = {});

  /// 0: not known.
  int64_t tokens() const override { return 0; }
  /// `begin`: of the tokens of all epochs. There is always a token after the last one.
  void read(int64_t begin, std::span<int32_t> out) const override;
  /// Also gives the positions in `out` at which documents begin.
  void read(int64_t begin, std::span<int32_t> out, std::vector<int64_t>& document_begins) const;
  /// Reads the unit that holds the token, and those before it that are not known, so that later
  /// reads after `position` need not begin before it. Returns its cursor.
  StreamCursor reach(int64_t position) const;
  /// Adds a cursor that `reach` has returned for the same files. Throws IoError for one that has no
  /// such shard.
  void seek(const StreamCursor& cursor) const;
  bool read_ahead() const override;
  const ShardStream* stream() const override { return this; }
  int64_t shuffle_windows() const { return options_.shuffle_windows; }
  /// Whether all shards know their documents.
  bool has_documents() const;
  int64_t shards() const { return int64_t(files_.size()); }
  /// Number of times a shard was opened.
  int64_t opened_shards() const;

  /// The open shard.
  void verify(Communicator* world = nullptr) const override;
  int32_t start_token() const override { return start_token_; }
  std::string format() const override { return format_.name; }
  std::string describe() const override;
  std::string identity() const override;

 private:
  struct Unit {
    StreamCursor begin;
    ShardUnit content;
    int64_t end() const { return begin.position + int64_t(content.tokens.size()); }
  };
  void add_record(const ShardFile& file);
  const ShardReader& open() const;
  void leave() const;
  void extend() const;
  void restart(int64_t position) const;
  void record(const StreamCursor& cursor) const;
  void skip(int64_t position) const;
  const StreamCursor& last_cursor(int64_t position) const;
  size_t find(int64_t position) const;

  std::vector<ShardFile> files_;
  ShardFormat format_;
  StreamOptions options_;
  Manifest known_;
  uint64_t bytes_ = 0;
  int32_t start_token_ = -1;
  mutable std::mutex mutex_;                            // guards what follows
  mutable std::map<int64_t, StreamCursor> cursors_;     // by position
  mutable std::deque<Unit> units_;                      // consecutive, each with tokens
  mutable StreamCursor next_;                           // of the unit after these
  mutable std::unique_ptr<ShardReader> shard_;          // of next_, or nullptr
  mutable int64_t shard_epoch_ = 0, shard_index_ = -1;  // of shard_
  mutable int64_t requested_ = 0;                       // end of the last tokens requested
  mutable int64_t tokenless_ = 0;                       // shards in a row that had no token
  mutable int64_t opened_ = 0;                          // shards, each time
};

}  // namespace tandem
