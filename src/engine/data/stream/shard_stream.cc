#include "engine/data/stream/shard_stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "core/system/files.h"
#include "engine/data/data_kind.h"
#include "engine/data/sampler.h"
#include "engine/data/stream/shared_work.h"
#include "engine/data/tokens/token_layout.h"
#include "engine/report/progress.h"
#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

constexpr uint64_t kShardOrder = stream_of("shard order");

// Cursors that a stream records: up to kMaxCursors, kCursorsPerRetained for each stretch of
// `retained_tokens`, so that they reach back 8 times as far as the tokens in memory.
constexpr size_t kMaxCursors = 64;
constexpr int64_t kCursorsPerRetained = 8;

}  // namespace

int64_t shard_at(uint64_t seed, int64_t epoch, int64_t shards, int64_t index) {
  return permute(seed ^ kShardOrder, uint64_t(epoch), shards, index);
}

ShardStream::ShardStream(std::span<const std::string> paths, ShardFormat format,
                         StreamOptions options, Communicator* world, Manifest known)
    : format_(std::move(format)), options_(options), known_(std::move(known)) {
  SharedWork work(world, "listing the shards", 0);
  std::string error, text;
  try {
    for (const std::string& path : paths) {
      ShardFile file = list_shard(path);
      work.advance(0);
      if (file.bytes == 0) {
        notes_.push_back(fmt::format("left out {}, which is empty", path));
        continue;
      }
      bytes_ += file.bytes;
      text += fmt::format("{}\n", file.bytes);
      add_record(file);
      files_.push_back(std::move(file));
    }
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);
  if (files_.empty()) {
    throw ConfigError(
        fmt::format("data.paths: {} files, all of them empty: expected some text", paths.size()));
  }
  if (format_.tokenizer) {
    std::vector<int32_t> tokens;
    format_.tokenizer->append("", tokens);
    start_token_ = tokens.at(0);
  } else {
    start_token_ = format_.separator_token;
  }
  fingerprint_ = content_hash(fmt::format("stream {} {} {} {}\n{}", format_.name,
                                          format_.tokenizer ? format_.tokenizer->name() : "",
                                          format_.separator, options_.shuffle_windows, text));
  cursors_[0] = {};
}

/// Records what is known of a shard before it is opened, and notes one that was written to since
/// its record was made: the fingerprint of a stream has only sizes.
void ShardStream::add_record(const ShardFile& file) {
  if (records_.size() >= kMaxRecords) return;
  const FileRecord& record = records_.emplace_back(
      FileRecord{std::filesystem::absolute(file.path).lexically_normal().string(),
                 file.bytes,
                 file.modified_ns,
                 {},
                 {}});
  if (const std::string note = known_.describe_write(record); !note.empty()) notes_.push_back(note);
}

/// ShardReader that `next_` is in.
const ShardReader& ShardStream::open() const {
  if (shard_ && shard_epoch_ == next_.epoch && shard_index_ == next_.shard) return *shard_;
  shard_.reset();
  const int64_t file = shard_at(options_.seed, next_.epoch, shards(), next_.shard);
  shard_ = open_shard(files_[size_t(file)], format_, known_);
  shard_epoch_ = next_.epoch, shard_index_ = next_.shard;
  ++opened_;
  return *shard_;
}

/// Steps to the begin of the shard after that of `next_`.
void ShardStream::leave() const {
  if (shard_) shard_->verify();
  shard_.reset();
  next_.offset = 0;
  if (++next_.shard == shards()) next_.shard = 0, ++next_.epoch;
  if (++tokenless_ > shards()) {
    throw IoError(fmt::format("data.paths: {} shards hold no token: expected some text", shards()));
  }
}

/// Reads the next unit that has tokens.
void ShardStream::extend() const {
  while (true) {
    const ShardReader& shard = open();
    if (shard.reach(uint64_t(next_.offset) + 1) <= uint64_t(next_.offset)) {
      leave();
      continue;
    }
    Unit unit{next_, shard.read(uint64_t(next_.offset))};
    next_.offset = int64_t(unit.content.end);
    next_.position = unit.end();
    if (unit.content.tokens.empty()) continue;
    tokenless_ = 0;
    units_.push_back(std::move(unit));
    break;
  }
  while (units_.size() > 1 && units_.front().end() + options_.retained_tokens < requested_) {
    units_.pop_front();
  }
}

/// Last cursor that is known up to `position`.
const StreamCursor& ShardStream::last_cursor(int64_t position) const {
  return std::prev(cursors_.upper_bound(position))->second;
}

/// Makes later restarts after `cursor` short. Of too many cursors the one farthest from it is
/// dropped, but never the begin of the stream.
void ShardStream::record(const StreamCursor& cursor) const {
  const int64_t before = cursor.position - last_cursor(cursor.position).position;
  if (before == 0 || before < options_.retained_tokens / kCursorsPerRetained) return;
  cursors_[cursor.position] = cursor;
  if (cursors_.size() <= kMaxCursors) return;
  const auto first = std::next(cursors_.begin()), last = std::prev(cursors_.end());
  const bool is_late = cursor.position - first->first > last->first - cursor.position;
  cursors_.erase(is_late ? first : last);
}

/// Begins to read at the last cursor before `position`.
void ShardStream::restart(int64_t position) const {
  units_.clear();
  next_ = last_cursor(position);
  requested_ = position;
  tokenless_ = 0;
  skip(position);
}

/// Skips units of token files that end before `position`.
void ShardStream::skip(int64_t position) const {
  while (true) {
    const ShardReader& shard = open();
    const int64_t unit = shard.unit_tokens();
    if (unit == 0) return;
    const int64_t left = int64_t(shard.reach(UINT64_MAX)) - next_.offset;
    if (next_.position + left > position) {
      const int64_t skipped = (position - next_.position) / unit * unit;
      next_.offset += skipped;
      next_.position += skipped;
      return;
    }
    next_.position += left;
    leave();
    if (left > 0) tokenless_ = 0;
  }
}

/// Index of the unit that holds the token.
size_t ShardStream::find(int64_t position) const {
  // A short gap is read: tokens before it are still needed.
  const bool is_far = last_cursor(position).position > next_.position + options_.retained_tokens;
  if (units_.empty() || position < units_.front().begin.position || is_far) restart(position);
  while (next_.position <= position) extend();
  const auto after = std::ranges::upper_bound(units_, position, {},
                                              [](const Unit& unit) { return unit.begin.position; });
  return size_t(after - units_.begin()) - 1;
}

StreamCursor ShardStream::reach(int64_t position) const {
  const std::lock_guard lock(mutex_);
  const StreamCursor cursor = units_[find(position)].begin;
  record(cursor);
  return cursor;
}

void ShardStream::read(int64_t begin, std::span<int32_t> out) const {
  std::vector<int64_t> unused;
  read(begin, out, unused);
}

void ShardStream::read(int64_t begin, std::span<int32_t> out,
                       std::vector<int64_t>& document_begins) const {
  const std::lock_guard lock(mutex_);
  document_begins.clear();
  for (size_t filled = 0; filled < out.size();) {
    const int64_t position = begin + int64_t(filled);
    const Unit& unit = units_[find(position)];
    const auto skipped = size_t(position - unit.begin.position);
    const size_t count = std::min(unit.content.tokens.size() - skipped, out.size() - filled);
    std::copy_n(unit.content.tokens.begin() + long(skipped), count, out.begin() + long(filled));
    for (const int64_t at : unit.content.document_begins) {
      const int64_t in_out = unit.begin.position + at - begin;
      if (in_out >= int64_t(filled) && in_out < int64_t(filled + count)) {
        document_begins.push_back(in_out);
      }
    }
    filled += count;
  }
  requested_ = std::max(requested_, begin + int64_t(out.size()));
}

void ShardStream::seek(const StreamCursor& cursor) const {
  if (cursor.shard >= shards()) {
    throw IoError(fmt::format("a cursor has shard {} of {}: expected at most {}", cursor.shard,
                              shards(), shards() - 1));
  }
  const std::lock_guard lock(mutex_);
  cursors_[cursor.position] = cursor;
}

bool ShardStream::read_ahead() const {
  const std::lock_guard lock(mutex_);
  if (units_.empty() || next_.position >= requested_ + options_.ahead_tokens) return false;
  try {
    extend();
  } catch (const std::exception&) {
    return false;  // thrown again where the tokens are used
  }
  return true;
}

void ShardStream::verify(Communicator* world) const {
  SharedWork work(world, "verifying the shards", 0);
  std::string error;
  try {
    const std::lock_guard lock(mutex_);
    if (shard_) shard_->verify();
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);
}

int64_t ShardStream::opened_shards() const {
  const std::lock_guard lock(mutex_);
  return opened_;
}

bool ShardStream::has_documents() const {
  if (format_.name != "tokens" || format_.separator_token >= 0) return true;
  return std::ranges::all_of(files_, [](const ShardFile& file) {
    return has_ending(file.path, ".bin") && path_exists(index_path(file.path));
  });
}

std::string ShardStream::describe() const {
  return fmt::format("a stream of {} shard{} ({}), {}", shards(), shards() == 1 ? "" : "s",
                     format_.name, format_bytes(double(bytes_)));
}

std::string ShardStream::identity() const {
  return fmt::format("{} shards, {} bytes, hash {}", shards(), bytes_, fingerprint());
}

}  // namespace tandem
