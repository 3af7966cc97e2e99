// Exchange whose message is those of segments, one after the other: slices of the shard that are
// encoded together. What is not sharded over tensor-parallel ranks (norms, routers) is sent in f32.
// Methods say which slices are a segment, and how one is encoded.
#pragma once

#include <cstddef>
#include <span>

#include "engine/parallel/sync/exchange.h"

namespace tandem {

class SegmentedExchange : public Exchange {
 public:
  explicit SegmentedExchange(const Exec& exec) : exec_(exec) {}
  size_t scratch_bytes(const SyncShard& shard) const override;
  void prepare(const SyncShard& shard) override;
  size_t bytes() const override { return scratch_.bytes(); }
  size_t max_bytes(const SyncShard& shard) const override;
  size_t encode(const SyncShard& shard, const Tensor& changes, const Tensor& unsent,
                std::byte* message) override;
  void combine(const SyncShard& shard, std::span<const std::byte* const> messages,
               const Tensor& mean) const override;

 protected:
  /// Adjacent slices of a shard.
  struct Segment {
    SyncSlice first;
    int64_t count = 0;  ///< elements of all
  };
  const Exec& exec() const { return exec_; }
  /// Array `index` of the scratch memory, f32 [elements].
  Tensor scratch(int index, int64_t elements) const;

 private:
  /// Whether a slice belongs to the segment of the one before, which is sharded as well.
  virtual bool continues(const SyncSlice& before, const SyncSlice& next) const = 0;
  /// Arrays of a sharded segment's elements in which it is encoded and combined.
  virtual int scratch_arrays() const { return 0; }
  // As those of Exchange, for a sharded segment; tensors have its elements.
  virtual size_t segment_bytes(const Segment& segment) const = 0;
  virtual void encode_segment(const Segment& segment, const Tensor& changes, const Tensor& unsent,
                              std::byte* message) = 0;
  virtual void combine_segment(const Segment& segment, std::span<const std::byte* const> messages,
                               const Tensor& mean) const = 0;

  size_t bytes(const Segment& segment) const;
  template <typename Visit>
  void for_each(const SyncShard& shard, const Visit& visit) const;

  const Exec exec_;
  Memory scratch_;  // arrays of the largest segment
};

}  // namespace tandem
