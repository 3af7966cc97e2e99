// Partition of one rank's flat parameter array for data parallelism (ZeRO-style, arXiv 1910.02054):
// into buckets from back to front, the order in which backward finishes gradients, and each bucket
// into one shard per rank. Pure functions of (elements, bucket size, ranks).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/model/parameter.h"
#include "tandem/collectives.h"

namespace tandem {

class Buckets {
 public:
  Buckets(int64_t elements, int64_t bucket_elements, int ranks)
      : elements_(elements), size_(std::max<int64_t>(bucket_elements, 1)), ranks_(ranks) {}

  int count() const { return int((elements_ + size_ - 1) / size_); }
  /// Bucket 0 is at the end of the array.
  FlatRange bucket(int b) const {
    const int64_t end = elements_ - b * size_;
    return {std::max<int64_t>(0, end - size_), std::min(size_, end)};
  }
  /// Bucket of an element.
  int at(int64_t element) const { return int((elements_ - 1 - element) / size_); }
  FlatRange shard(int b, int rank) const {
    const FlatRange whole = bucket(b);
    const Shard local = shard_of(whole.count, ranks_, rank);
    return {whole.begin + local.begin, local.count};
  }
  /// Contiguous slots for one shard of each bucket (local or staged for a peer): offset of bucket
  /// b's slot, and elements of all slots.
  int64_t slot_begin(int b) const { return b * shard_room(); }
  int64_t slot_elements() const { return count() * shard_room(); }
  /// Elements of the largest shard.
  int64_t shard_room() const { return (std::min(size_, elements_) + ranks_ - 1) / ranks_; }
  int64_t elements() const { return elements_; }
  int ranks() const { return ranks_; }

 private:
  int64_t elements_, size_;
  int ranks_;
};

/// FlatRange of the flat array with uniform properties. Padding belongs to none.
struct ParameterRun {
  int64_t begin = 0, count = 0;
  bool decay = true;
  bool sharded = true;  ///< over TP; else replicated on every TP rank
  int tensor = -1;      ///< index in the list, if runs are split by tensor
  float lr_scale = 1;
  bool operator==(const ParameterRun&) const = default;
};
/// Runs sorted by position; adjacent ones with equal properties are merged, those of two tensors
/// unless `by_tensor`.
std::vector<ParameterRun> parameter_runs(std::span<const Parameter> parameters,
                                         bool by_tensor = false);

}  // namespace tandem
