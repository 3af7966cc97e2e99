// Parts of a rank's weights by tensor: what checks compare, and where faults are injected.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "engine/train/model_ranks.h"

namespace tandem {

/// Rows of one tensor's shard on this rank, at most about a million elements.
struct WeightUnit {
  size_t chunk = 0;      ///< index in ModelRanks::chunks
  size_t parameter = 0;  ///< index in its parameter_list()
  int64_t begin = 0;     ///< first element in the chunk's flat array
  int64_t rows = 1, columns = 0, row_stride = 0;
  double position = 0;   ///< in [0, 1), among all weights of the model; the same on all ranks
  bool sharded = false;  ///< over tensor-parallel ranks
  bool expert = false;

  /// First element of a row in the flat array.
  int64_t row(int64_t index) const { return begin + index * row_stride; }
};

/// Units of all tensors on this rank, in the order of the model's parameters. Copies of a tensor
/// have the same units on all their ranks.
std::vector<WeightUnit> weight_units(const ModelRanks& ranks);

/// Memory of `count` weights from `begin` in a chunk's flat array, within a tensor, as passes read
/// them: in the dtype of GEMMs, or in f32 for norms and routers.
Tensor weights_as_read(const ModelChunk& chunk, bool sharded, int64_t begin, int64_t count);

}  // namespace tandem
