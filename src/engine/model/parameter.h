// Named tensor of the model, and the shard of it on a rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

/// Elements [begin, begin + count) of a rank's flat arrays.
struct FlatRange {
  int64_t begin = 0, count = 0;
  int64_t end() const { return begin + count; }
  bool operator==(const FlatRange&) const = default;
};

/// Elements [local, local + count) of a stage's flat array, from `whole` in the whole model's.
struct WindowRange {
  int64_t local = 0, whole = 0, count = 0;
};

/// Elements of the whole model's flat array that are in a stage's, in the same order.
struct FlatWindow {
  int64_t elements = 0;             ///< of the whole model
  std::vector<WindowRange> ranges;  ///< ascending, without gaps in the stage's array

  static FlatWindow all(int64_t elements) { return {elements, {{0, 0, elements}}}; }
  int64_t local_elements() const {
    return ranges.empty() ? 0 : ranges.back().local + ranges.back().count;
  }
  /// Position of a local element in the whole model.
  int64_t whole(int64_t local) const;
  /// Local elements of a range of the whole model.
  FlatRange local(FlatRange whole) const;
};

/// Sharding of a tensor over the ranks of each kind, and this rank's shard. Data-parallel ranks
/// hold the same weights; they shard the flat array instead (engine/parallel/sharded/buckets.h).
struct Sharding {
  int tp_dim = -1;               ///< dimension sharded over TP ranks; -1: replicated
  int64_t begin = 0, count = 0;  ///< this rank's range of tp_dim; all elements if tp_dim is -1
  int ep_rank = -1;  ///< EP rank that holds an expert's tensor, `count` is 0 on others; -1: all EP
                     ///< ranks hold it
  bool absent = false;  ///< on this rank: a parameter of another stage

  bool over_tp() const { return tp_dim >= 0; }
  bool over_ep() const { return ep_rank >= 0; }
};

/// Named tensor of the model as stored on disk, and this rank's shard of it.
struct Parameter {
  std::string name;            ///< Hugging Face name, "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  ///< full shape, one or two dimensions
  Sharding sharding = {};
  int64_t offset = 0;      ///< first element of the local view in parameters()
  int64_t row_stride = 0;  ///< elements between rows of the local view (2-D), 1-D: unused
  bool decay = true;       ///< weight decay applies (matrices, not norms)
  float initial = 1;       ///< initial value, unless a random matrix
  float lr_scale = 1;      ///< factor of the learning rate
  /// First of a layer's experts, or of a branch without norm: those before it, with equal
  /// properties, may be in another stage. All other layers begin with a norm, whose properties
  /// differ.
  bool begins_layer = false;
};

/// Local shard as rows (a vector is one row) of the flat array and of the full tensor.
struct LocalShard {
  int64_t rows = 1, columns = 0;
  int64_t row_stride = 0;     ///< elements between rows in the flat array
  int64_t first = 0;          ///< first element in the full tensor
  int64_t whole_columns = 0;  ///< elements between rows in the full tensor
};
LocalShard local_shard(const Parameter& parameter);
/// Elements of the flat array from the first to the last of the local shard.
FlatRange local_range(const Parameter& parameter);

}  // namespace tandem
