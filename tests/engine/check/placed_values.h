// Values of tensors on ranks, by their placements.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/model/placement.h"
#include "engine/parallel/dims.h"

namespace tandem {

/// Matrix; a vector has one column.
struct Values {
  int64_t rows = 0, columns = 0;
  std::vector<float> values;

  float& at(int64_t row, int64_t column) { return values[size_t(row * columns + column)]; }
  float at(int64_t row, int64_t column) const { return values[size_t(row * columns + column)]; }
};

/// Seeded values in (-1, 1).
Values random_values(int64_t rows, int64_t columns, uint64_t seed);

/// Values of a tensor that a rank holds. Terms of a sum are random.
Values local_values(const Values& whole, const PlacedTensor& placed, const ParallelDims& dims,
                    int rank);

/// The tensor that all ranks hold; none if replicas differ by more than `bound`, or if the shapes
/// do not fit.
std::optional<Values> assemble(const std::vector<Values>& of_ranks, const PlacedTensor& placed,
                               const ParallelDims& dims, float bound);

/// Max |a - b| / max |b|; infinite for another shape.
double max_difference(const Values& a, const Values& b);

}  // namespace tandem
