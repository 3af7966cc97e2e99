#include "placed_values.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "tandem/collectives.h"
#include "tandem/random.h"

namespace tandem {
namespace {

Values narrow(const Values& v, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  Values out{rows, columns, {}};
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) out.values.push_back(v.at(row + i, column + j));
  }
  return out;
}

/// Term `index` of `size`: a random share of each element.
Values term(const Values& v, int size, int index) {
  Values out = v;
  for (size_t i = 0; i < v.values.size(); ++i) {
    double sum = 0, local = 0;
    for (int k = 0; k < size; ++k) {
      const double weight = 1 + philox(7, uint64_t(k), i)[0] % 1000;
      sum += weight;
      if (k == index) local = weight;
    }
    out.values[i] *= float(local / sum);
  }
  return out;
}

/// Values of an axis's ranks combined; none if they contradict the placement.
std::optional<Values> combine(const std::vector<Values>& shards, const Placement& placement,
                              float bound) {
  Values all = shards.front();
  if (placement.kind() == Placement::Kind::one_rank) {
    for (size_t k = 0; k < shards.size(); ++k) {
      if (int(k) != placement.rank() && !shards[k].values.empty()) return {};
    }
    return shards[size_t(placement.rank())];
  }
  for (size_t k = 1; k < shards.size(); ++k) {
    const Values& shard = shards[k];
    if (placement == Placement::sharded(0)) {
      if (shard.columns != all.columns) return {};
      all.values.insert(all.values.end(), shard.values.begin(), shard.values.end());
      all.rows += shard.rows;
      continue;
    }
    if (shard.rows != all.rows) return {};
    if (placement == Placement::sharded(1)) {
      Values wide{all.rows, all.columns + shard.columns, {}};
      for (int64_t i = 0; i < all.rows; ++i) {
        for (int64_t j = 0; j < all.columns; ++j) wide.values.push_back(all.at(i, j));
        for (int64_t j = 0; j < shard.columns; ++j) wide.values.push_back(shard.at(i, j));
      }
      all = std::move(wide);
      continue;
    }
    if (shard.columns != all.columns) return {};
    for (size_t i = 0; i < all.values.size(); ++i) {
      if (placement == Placement::partial()) {
        all.values[i] += shard.values[i];
      } else if (std::abs(all.values[i] - shard.values[i]) > bound) {
        return {};
      }
    }
  }
  return all;
}

int rank_at(const ParallelDims& dims, const std::array<int, kNumLearnerAxes>& coordinates) {
  int rank = 0;
  for (int axis = kNumLearnerAxes; axis-- > 0;) {
    rank = rank * dims.size({Axis(axis)}) + coordinates[size_t(axis)];
  }
  return rank;
}

std::optional<Values> assemble_axis(const std::vector<Values>& of_ranks, const PlacedTensor& placed,
                                    const ParallelDims& dims, float bound, int axis,
                                    std::array<int, kNumLearnerAxes>& coordinates) {
  if (axis < 0) return of_ranks[size_t(rank_at(dims, coordinates))];
  std::vector<Values> shards;
  for (int i = 0; i < dims.size({Axis(axis)}); ++i) {
    coordinates[size_t(axis)] = i;
    auto shard = assemble_axis(of_ranks, placed, dims, bound, axis - 1, coordinates);
    if (!shard) return {};
    shards.push_back(std::move(*shard));
  }
  return combine(shards, placed.over(Axis(axis)), bound);
}

}  // namespace

Values random_values(int64_t rows, int64_t columns, uint64_t seed) {
  Values v{rows, columns, {}};
  for (int64_t i = 0; i < rows * columns; ++i) {
    v.values.push_back(float(philox(seed, 3, uint64_t(i))[0] % 2001) / 1000 - 1);
  }
  return v;
}

Values local_values(const Values& whole, const PlacedTensor& placed, const ParallelDims& dims,
                    int rank) {
  Values v = whole;
  for (int axis = kNumLearnerAxes; axis-- > 0;) {
    const int size = dims.size({Axis(axis)}), index = dims.index({Axis(axis)}, rank);
    const Placement& placement = placed.over(Axis(axis));
    if (placement == Placement::sharded(0)) {
      const Shard shard = shard_of(v.rows, size, index);
      v = narrow(v, shard.begin, shard.count, 0, v.columns);
    } else if (placement == Placement::sharded(1)) {
      const Shard shard = shard_of(v.columns, size, index);
      v = narrow(v, 0, v.rows, shard.begin, shard.count);
    } else if (placement == Placement::partial()) {
      v = term(v, size, index);
    }
  }
  return v;
}

std::optional<Values> assemble(const std::vector<Values>& of_ranks, const PlacedTensor& placed,
                               const ParallelDims& dims, float bound) {
  std::array<int, kNumLearnerAxes> coordinates{};
  return assemble_axis(of_ranks, placed, dims, bound, kNumLearnerAxes - 1, coordinates);
}

double max_difference(const Values& a, const Values& b) {
  if (a.rows != b.rows || a.columns != b.columns) return std::numeric_limits<double>::infinity();
  double difference = 0, max = 0;
  for (size_t i = 0; i < a.values.size(); ++i) {
    difference = std::max(difference, std::abs(double(a.values[i]) - double(b.values[i])));
    max = std::max(max, std::abs(double(b.values[i])));
    if (std::isnan(a.values[i])) return std::numeric_limits<double>::infinity();
  }
  return max == 0 ? difference : difference / max;
}

}  // namespace tandem
