// Windows in which data held out of training are scored, `stride` apart, each scoring the positions
// that the previous one did not reach.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/data/text/packing.h"
#include "engine/data/tokens/token_source.h"

namespace tandem {

struct ScoredWindow {
  std::vector<int32_t> tokens, targets;  ///< as many of both; target -1: context, not scored
  /// Argument of Stage::set_documents; empty: one document.
  std::vector<int32_t> document_starts = {};
};

/// Number of windows of `seq` positions that score `positions`.
int64_t count_windows(int64_t positions, int64_t seq, int64_t stride);

class ScoredWindows {
 public:
  virtual ~ScoredWindows() = default;
  int64_t count() const { return count_; }
  int64_t all() const { return all_; }  ///< without the limit
  /// Throws IoError naming a file that cannot be read or has changed.
  virtual ScoredWindow read(int64_t index) const = 0;

 protected:
  /// Uses, of `all` windows with `positions` scored positions, only as many as score about `max`
  /// (0: no limit).
  void set_count(int64_t all, int64_t positions, int64_t stride, int64_t max);
  /// Number of the window, among all, of this index: they are evenly spread.
  int64_t window(int64_t index) const { return int64_t(__int128(index) * all_ / count_); }

 private:
  int64_t all_ = 0, count_ = 0;
};

/// Windows of a stream of tokens: position p holds token p and predicts token p + 1. With
/// `document_mask` they know their documents, which leave out targets (documents.h).
class StreamWindows : public ScoredWindows {
 public:
  StreamWindows(std::shared_ptr<const TokenSource> stream, int64_t seq, int64_t stride,
                int64_t max_tokens, bool document_mask = false);
  ScoredWindow read(int64_t index) const override;

 private:
  std::shared_ptr<const TokenSource> stream_;
  int64_t seq_, stride_;
  bool document_mask_;
};

/// Packed documents of a stream (packing.h), each scored once and whole, up to `seq` tokens.
class PackedWindows : public ScoredWindows {
 public:
  PackedWindows(std::shared_ptr<const TokenSource> stream, int64_t seq, int64_t max_tokens);
  ScoredWindow read(int64_t index) const override;

 private:
  std::shared_ptr<const TokenSource> stream_;
  int64_t seq_;
  std::shared_ptr<const Packing> packing_;
};

}  // namespace tandem
