#include "engine/train/model_pieces.h"

#include <algorithm>

#include "engine/model/weights.h"

namespace tandem {
namespace {

constexpr int64_t kUnitElements = int64_t{1} << 20;

int64_t elements_of(const Parameter& parameter) {
  int64_t elements = 1;
  for (const int64_t extent : parameter.shape) elements *= extent;
  return elements;
}

/// Units of one tensor. Their number depends only on its full shape.
void add_units(const WeightUnit& whole, int64_t elements, double begin, double share,
               std::vector<WeightUnit>& units) {
  const int64_t number = (elements + kUnitElements - 1) / kUnitElements;
  const bool is_contiguous = whole.rows == 1 || whole.columns == whole.row_stride;
  for (int64_t i = 0; i < number; ++i) {
    WeightUnit unit = whole;
    unit.position = begin + share * double(i) / double(number);
    if (is_contiguous) {
      const int64_t count = whole.rows * whole.columns;
      unit.begin += count * i / number;
      unit.columns = unit.row_stride = count * (i + 1) / number - count * i / number;
      unit.rows = 1;
    } else {
      const int64_t first = whole.rows * i / number;
      unit.begin = whole.row(first);
      unit.rows = whole.rows * (i + 1) / number - first;
    }
    units.push_back(unit);
  }
}

}  // namespace

std::vector<WeightUnit> weight_units(const ModelRanks& ranks) {
  std::vector<WeightUnit> units;
  for (size_t chunk = 0; chunk < ranks.chunks.size(); ++chunk) {
    const std::vector<Parameter>& list = ranks.chunks[chunk].stage.parameter_list();
    double all = 0, before = 0;
    for (const Parameter& parameter : list) all += double(elements_of(parameter));
    for (size_t i = 0; i < list.size(); ++i) {
      const LocalShard shard = local_shard(list[i]);
      const auto elements = elements_of(list[i]);
      if (shard.rows > 0 && shard.columns > 0) {
        add_units({.chunk = chunk,
                   .parameter = i,
                   .begin = list[i].offset,
                   .rows = shard.rows,
                   .columns = shard.columns,
                   .row_stride = shard.row_stride,
                   .sharded = list[i].sharding.over_tp(),
                   .expert = list[i].sharding.over_ep()},
                  elements, before / all, double(elements) / all, units);
      }
      before += double(elements);
    }
  }
  return units;
}

Tensor weights_as_read(const ModelChunk& chunk, bool sharded, int64_t begin, int64_t count) {
  const WeightViews& views = chunk.stage.weights();
  if (sharded && views.working.data()) return views.working.narrow(0, begin, count);
  return views.in_f32({begin, count});
}

}  // namespace tandem
