// A named tensor of the model, and which part of it a rank holds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

/// How a tensor is split over the ranks of every kind, and this rank's part. Over data-parallel
/// ranks weights are the same; what those split is the flat array (engine/parallel/buckets.h).
struct Sharding {
  int tp_dim = -1;  ///< the dimension that TP ranks split; -1: all of them hold the same
  int64_t begin = 0, count = 0;  ///< this rank's range of tp_dim, without one all elements
  int ep_rank = -1;  ///< of an expert's tensor, the EP rank that holds it: `count` is 0 on others;
                     ///< -1: all of them hold it

  bool over_tp() const { return tp_dim >= 0; }
  bool over_ep() const { return ep_rank >= 0; }
};

/// One named tensor of the model as it stands on disk, and the part of it this rank holds.
struct Parameter {
  std::string name;            ///< Hugging Face name, "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  ///< whole: one dimension or two
  Sharding sharding = {};
  int64_t offset = 0;      ///< of the local view's first element in parameters()
  int64_t row_stride = 0;  ///< elements between rows of the local view (2-D), 1-D: unused
  bool decay = true;       ///< weight decay applies (matrices, not norms)
  float initial = 1;       ///< of what is not a random matrix
};

/// The part that this rank holds, as rows (a vector is one row) of the flat array and of the whole
/// tensor.
struct LocalPart {
  int64_t rows = 1, columns = 0;
  int64_t row_stride = 0;     ///< elements between rows in the flat array
  int64_t first = 0;          ///< element of the whole tensor that the part begins with
  int64_t whole_columns = 0;  ///< elements between rows in the whole tensor
};
LocalPart local_part(const Parameter& parameter);

}  // namespace tandem
