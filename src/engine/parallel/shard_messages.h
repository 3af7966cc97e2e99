// What one shard of a bucket travels as between data-parallel ranks.
//
// A shard is cut into segments, in the order of the array. Where weights are split over the
// tensor-parallel ranks, a segment is a message of the wire. All else (norms, routers, padding)
// travels as it is: tensor-parallel ranks hold the same values there, but their shards begin in
// other places, and what they decoded would differ. A message of a shard is its segments one after
// the other, each encoded one behind 16 bytes that hold its length.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "engine/parallel/buckets.h"
#include "tandem/codec.h"

namespace tandem {

struct Segment {
  int64_t begin = 0, count = 0;  ///< within the shard
  bool encoded = false;
};

/// The segments of `range` of an array with these `runs`.
std::vector<Segment> segments_of(Buckets::Range range, std::span<const ParameterRun> runs);

class ShardMessages {
 public:
  /// Throws InvalidArgument for a wire that takes no f32. With one that is none, all of a shard is
  /// one segment that travels as it is.
  ShardMessages(const Wire& wire, const Buckets& buckets, std::span<const ParameterRun> runs);

  const Wire& wire() const { return wire_; }
  std::span<const Segment> segments(int bucket, int owner) const {
    return segments_[size_t(bucket * ranks_ + owner)];
  }
  /// Of the largest message; a multiple of 16.
  size_t most_bytes() const { return most_bytes_; }

  /// `values`: of the shard. `residual`: of its error feedback, or null. Returns the bytes used.
  size_t encode(int bucket, int owner, const float* values, float* residual,
                std::byte* message) const;
  void decode(int bucket, int owner, const std::byte* message, float* values) const;

 private:
  Wire wire_;
  int ranks_;
  std::vector<std::vector<Segment>> segments_;  // by bucket and owner
  size_t most_bytes_ = 0;
};

}  // namespace tandem
