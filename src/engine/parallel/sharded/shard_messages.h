// Message format of one shard of a bucket between data-parallel ranks.
//
// A shard is split into segments, in array order. Weights sharded over the tensor-parallel ranks
// are encoded, one message of the wire format per segment. All else (norms, routers, padding) is
// sent uncompressed: tensor-parallel ranks hold the same values there, but their shards begin at
// different offsets, so decoded values would differ. A message concatenates its segments; each
// encoded one is preceded by 16 bytes that hold its length.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/exec.h"
#include "engine/parallel/sharded/buckets.h"
#include "tandem/codec.h"

namespace tandem {

struct Segment {
  int64_t begin = 0, count = 0;  ///< within the shard
  bool encoded = false;
};

/// Segments of `range` of an array with these `runs`.
std::vector<Segment> make_segments(FlatRange range, std::span<const ParameterRun> runs);

class ShardMessages {
 public:
  /// Throws InvalidArgument for a wire format that does not support f32. Without a wire format a
  /// shard is one uncompressed segment, of `dtype`.
  ShardMessages(const Wire& wire, const Buckets& buckets, std::span<const ParameterRun> runs,
                DType dtype = DType::f32);

  const Wire& wire() const { return wire_; }
  std::span<const Segment> segments(int bucket, int owner) const {
    return segments_[size_t(bucket * ranks_ + owner)];
  }
  /// Bytes of the largest message; a multiple of 16.
  size_t max_bytes() const { return max_bytes_; }

  /// `values`: elements of the shard. `residual`: its error feedback residual, or null. Returns the
  /// bytes used.
  size_t encode(int bucket, int owner, const float* values, float* residual,
                std::byte* message) const;
  void decode(int bucket, int owner, const std::byte* message, float* values) const;

 private:
  Wire wire_;
  int ranks_;
  std::vector<std::vector<Segment>> segments_;  // by bucket and owner
  size_t max_bytes_ = 0;
};

}  // namespace tandem
