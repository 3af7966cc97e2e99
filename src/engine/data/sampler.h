// Order of the windows of the training stream.
//
// Window w holds tokens [w * seq, w * seq + seq) and as targets the token after each, so the
// windows together predict every token of the stream but the first exactly once; the last window
// may be short (targets -1). Samples are numbered 0, 1, 2, … over the whole run: sample i is window
// permutation(i mod windows) of epoch i / windows. The permutation is a keyed bijection computed
// from (seed, epoch, index), so the sampler's whole state is the number of the next sample and does
// not depend on how many ranks share the batch.
//
// A blend has the windows of its sources, one source after the other. Sample i is of the source
// that BlendOrder gives it; it is the source's j-th sample, j being computed from i, and so window
// permutation(j mod windows) of the source's epoch j / windows.
//
// Packed documents (packing.h) are sequences in place of windows.
//
// A stream of shards (shard_stream.h) has windows without end: sample i is window
// i - i mod b + permutation(i mod b) of it, permuted by the block i / b, for b = shuffle_windows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/data/blend/blend_order.h"
#include "engine/data/stream/stream_cursor.h"
#include "engine/data/text/packing.h"
#include "engine/data/tokens/token_source.h"

namespace tandem {

/// Bijection of [0, size): a Feistel network on the next even number of bits, iterated until the
/// value is below size (cycle walking).
int64_t permute(uint64_t seed, uint64_t epoch, int64_t size, int64_t index);

struct SamplerOptions {
  /// Maps the numbers of samples that are asked for to those of the run, for layouts that divide a
  /// step among other ranks; none: the same.
  std::function<int64_t(int64_t sample)> order = {};
  bool document_mask = false;  ///< leaves out targets as documents.h does
  bool is_packed = false;
};

class Sampler {
 public:
  /// With options for documents, all sources have some (require_documents).
  Sampler(const TokenSource& source, int64_t seq, uint64_t seed, SamplerOptions options = {});
  /// Windows of all sources; 0 for streams of shards.
  int64_t windows() const { return windows_; }
  /// Number of whole epochs before `sample`; in a blend, of as many samples as it has windows.
  /// 0 for streams, whose cursors have theirs.
  int64_t epoch(int64_t sample) const { return windows_ > 0 ? sample / windows_ : 0; }
  int64_t window(int64_t sample) const;
  /// Epochs of all sources that end before `sample`.
  int64_t ended_epochs(int64_t sample) const;
  /// Cursors of the streams of shards, in the order of the sources, at the begin of the blocks that
  /// `sample` and those after it are of; empty without streams. Reads the shards up to there.
  std::vector<StreamCursor> cursors(int64_t sample) const;
  /// Gives the streams cursors that `cursors` has returned in another process, which saves time.
  /// Throws IoError for those of other data.
  void seek(std::span<const StreamCursor> cursors) const;
  /// TokenSource::read_ahead of the sources.
  bool read_ahead() const;
  /// Number of targets of the sample that are not -1. Reads the sample of a stream if documents
  /// leave out some: may throw IoError.
  int64_t targets(int64_t sample) const;
  /// Sources of a blend, in order, or the only source.
  std::vector<SampledSource> sources() const;
  /// Share of positions that packing leaves empty, of all sources; nullopt without packing.
  std::optional<double> padding() const;
  /// Whether a sample has tokens of -1.
  bool has_padding() const;
  bool document_mask() const { return options_.document_mask; }
  /// Fills seq tokens, -1 after the end of the stream or of a sequence's last document, and seq
  /// targets and, unless it is empty, the position at which each one's document begins.
  void read(int64_t sample, std::span<int32_t> tokens, std::span<int32_t> targets,
            std::span<int32_t> document_starts = {}) const;

 private:
  /// Source of a blend.
  struct Stream {
    const TokenSource* source;
    double weight;
    std::shared_ptr<const Packing> packing;  ///< nullptr: windows of the stream
    int64_t first_window, windows;
    const ShardStream* shards;  ///< nullptr: not one
  };
  struct Location {
    size_t stream;
    int64_t window;  ///< of the stream
  };
  Location locate(int64_t sample) const;
  void read_shards(const Location& location, std::span<int32_t> tokens, std::span<int32_t> targets,
                   std::span<int32_t> document_starts) const;

  int64_t seq_, windows_ = 0;
  uint64_t seed_;
  std::vector<Stream> streams_;
  BlendOrder blend_;
  SamplerOptions options_;
};

}  // namespace tandem
