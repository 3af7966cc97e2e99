// Partition of one rank's flat parameter array for data parallelism (ZeRO-style, arXiv 1910.02054):
// into buckets from back to front, the order in which backward finishes gradients, and each bucket
// into one shard per rank. Pure functions of (elements, bucket size, ranks, logical replicas).
// Where ranks run several logical replicas, a bucket has one shard per replica, and a rank owns
// consecutive ones: sums over a shard are the same for any number of ranks.
//
// Ranges may be undivided: a bucket or a shard that would begin within one begins with it.
//
// The array of a pipeline stage has a window of the whole model's: its buckets and shards are the
// whole model's without the elements of other stages, so every element has the same owner, and
// every sum the same order, for any stages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/model/parameter.h"
#include "engine/model/stage.h"
#include "engine/parallel/config.h"
#include "tandem/collectives.h"

namespace tandem {

/// Ranks in consecutive groups of one size, such as those of a host. The shards of the ranks with
/// one index in their groups are consecutive.
struct RankGrid {
  int size = 1, groups = 1;
  int index(int rank) const { return rank % size; }
  int group(int rank) const { return rank / size; }
  /// Shards of the rank of a group with that index.
  Shard shard(int index, int group) const { return {index * groups + group, 1}; }
  std::vector<Shard> by_rank() const;
  /// Shards of all ranks with an index, by index, and of each of them, by group.
  std::vector<Shard> by_index() const;
  std::vector<Shard> by_group(int index) const;
};

class Buckets {
 public:
  Buckets(int64_t elements, int64_t bucket_elements, int ranks)
      : Buckets(FlatWindow::all(elements), bucket_elements, ranks) {}
  /// `replicas`: at least `ranks`, or 0 for as many.
  Buckets(FlatWindow window, int64_t bucket_elements, int ranks, int replicas = 0,
          std::vector<FlatRange> undivided = {});
  /// `owned`: consecutive replicas whose shards each rank owns, at least one. `undivided`: ranges
  /// of the whole model's array, ascending and apart, those of other stages left out.
  Buckets(FlatWindow window, int64_t bucket_elements, std::vector<Shard> owned, int replicas,
          std::vector<FlatRange> undivided = {});

  /// Buckets with elements.
  int count() const { return int(numbers_.size()); }
  /// Bucket 0 is at the end of the array.
  FlatRange bucket(int b) const { return window_.local(whole_bucket(b)); }
  /// Bucket of an element.
  int at(int64_t element) const;
  /// Replicas whose shards a rank owns.
  Shard owned(int rank) const { return owned_[size_t(rank)]; }
  /// The elements that a rank owns.
  FlatRange shard(int b, int rank) const {
    const Shard owned = this->owned(rank);
    return shards(b, int(owned.begin), int(owned.begin + owned.count) - 1);
  }
  /// The shard of one replica.
  FlatRange replica_shard(int b, int replica) const { return shards(b, replica, replica); }
  /// Number of a bucket among those of the whole model.
  int64_t number(int b) const { return numbers_[size_t(b)]; }
  const FlatWindow& window() const { return window_; }
  /// Contiguous slots for one shard of each bucket (local or staged for a peer): offset of bucket
  /// b's slot, and elements of all slots.
  int64_t slot_begin(int b) const { return b * shard_room(); }
  int64_t slot_elements() const { return count() * shard_room(); }
  /// Elements of the largest shard.
  int64_t shard_room() const { return shard_room_; }
  int64_t elements() const { return window_.local_elements(); }
  int64_t bucket_elements() const { return size_; }  ///< of a bucket, but for undivided ranges
  const std::vector<FlatRange>& undivided() const { return undivided_; }
  int ranks() const { return int(owned_.size()); }
  int replicas() const { return replicas_; }

 private:
  FlatRange whole_bucket(int b) const { return cut(numbered_bucket(numbers_[size_t(b)])); }
  /// Before it is cut, as the shards: the same for any stages.
  FlatRange numbered_bucket(int64_t number) const {
    const int64_t end = window_.elements - number * size_;
    return {std::max<int64_t>(0, end - size_), std::min(size_, end)};
  }
  /// From the first replica's to the last one's.
  FlatRange shards(int b, int first, int last) const {
    const FlatRange whole = numbered_bucket(numbers_[size_t(b)]);
    const int64_t begin = shard_of(whole.count, replicas_, first).begin;
    const Shard end = shard_of(whole.count, replicas_, last);
    return window_.local(cut({whole.begin + begin, end.begin + end.count - begin}));
  }
  FlatRange cut(FlatRange range) const {
    const int64_t begin = cut(range.begin);
    return {begin, cut(range.end()) - begin};
  }
  /// The position, or the begin of the undivided range that it lies within.
  int64_t cut(int64_t position) const;
  /// Number of the bucket of an element of the whole model.
  int64_t number_of(int64_t element) const;

  FlatWindow window_;
  int64_t size_;
  std::vector<FlatRange> undivided_;
  std::vector<Shard> owned_;  // by rank
  int replicas_;
  int64_t shard_room_ = 0;
  std::vector<int64_t> numbers_;  // ascending
};

/// parallel.dp_bucket_mib, or what is chosen for it.
double bucket_mib(const ParallelConfig& parallel, bool on_gpus);
int64_t bucket_elements(const ParallelConfig& parallel, bool on_gpus);
/// Groups whose gradients are a window with parallel.zero.
GradientWindow gradient_window(const ParallelConfig& parallel, bool on_gpus);

/// FlatRange of the flat array with uniform properties. Padding belongs to none.
struct ParameterRun {
  int64_t begin = 0, count = 0;
  bool decay = true;
  bool sharded = true;        ///< over TP; else replicated on every TP rank
  bool begins_layer = false;  ///< see Parameter
  int tensor = -1;            ///< index in the list, if runs are split by tensor
  float lr_scale = 1;
  bool operator==(const ParameterRun&) const = default;
};
/// Runs sorted by position; adjacent ones with equal properties are merged, but not over the begin
/// of a layer: runs, and thus sums over them, are the same for any stages. Those of two tensors are
/// not, either, if `by_tensor`.
std::vector<ParameterRun> parameter_runs(std::span<const Parameter> parameters,
                                         bool by_tensor = false);

}  // namespace tandem
