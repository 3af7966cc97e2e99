#include "engine/parallel/sync/demo.h"

#include <fmt/format.h>

#include "engine/parallel/sync/segmented_exchange.h"
#include "kernels/dct.h"
#include "kernels/outer_step.h"
#include "tandem/error.h"

namespace tandem {
namespace {

void update_demo(const Exec& exec, const AdamStep& step, bool decay, double /*trust_ratio*/,
                 const AdamState& state, const Tensor& gradient, const Tensor& /*working*/) {
  if (decay) scale(exec, state.w, 1 - step.lr * step.weight_decay, state.w);
  scale(exec, gradient, step.lr * step.gradient_scale, state.v);
}

class Demo : public SegmentedExchange {
 public:
  Demo(const SyncConfig& config, const Exec& exec) : SegmentedExchange(exec), config_(config) {}

  void combine(const SyncShard& shard, std::span<const std::byte* const> messages,
               const Tensor& mean) const override {
    SegmentedExchange::combine(shard, messages, mean);
    take_signs(exec(), mean);
  }

 private:
  /// A segment is a parameter.
  bool continues(const SyncSlice& before, const SyncSlice& next) const override {
    return next.parameter == before.parameter;
  }
  int scratch_arrays() const override { return kScratchArrays; }
  size_t segment_bytes(const Segment& segment) const override {
    return size_t(topk_of(tiles_of(segment)).bytes(segment.count));
  }
  void encode_segment(const Segment& segment, const Tensor& changes, const Tensor& unsent,
                      std::byte* message) override {
    const DctTiles tiles = tiles_of(segment);
    const Tensor cosines = scratch(0, segment.count), rest = scratch(1, segment.count);
    dct_forward(exec(), tiles, 1, changes, cosines);
    to_tiles(exec(), tiles, unsent, rest);
    encode_topk(exec(), topk_of(tiles), float(config_.decay()), cosines, rest, message);
    from_tiles(exec(), tiles, rest, unsent);
  }
  void combine_segment(const Segment& segment, std::span<const std::byte* const> messages,
                       const Tensor& mean) const override {
    const DctTiles tiles = tiles_of(segment);
    const Tensor cosines = scratch(0, segment.count);
    mean_topk(exec(), topk_of(tiles), messages, codec::TopKMean::senders, cosines);
    dct_inverse(exec(), tiles, cosines, mean);
  }

  /// Tiles of the whole matrix that this rank has.
  DctTiles tiles_of(const Segment& segment) const {
    const auto& [first, count] = segment;
    DctTiles tiles = DctTiles::of(first.rows, first.columns, config_.tile_side());
    const int64_t columns = first.local_columns;
    if (count % (tiles.height * columns) != 0 || columns % tiles.width != 0) {
      throw InvalidArgument(fmt::format(
          "demo: {} elements in rows of {} of parameter {}: expected whole tiles of {} x {}", count,
          columns, first.parameter, tiles.height, tiles.width));
    }
    tiles.rows = count / columns;
    tiles.columns = columns;
    return tiles;
  }
  codec::TopK topk_of(const DctTiles& tiles) const { return config_.sparse(tiles.elements()); }

  static constexpr int kScratchArrays = 2;  // cosines and those not sent, by tile

  const SyncConfig config_;
};

}  // namespace

const Optimizer kDemoOptimizer{"demo", update_demo};

std::unique_ptr<Exchange> make_demo_exchange(const SyncConfig& config, const Exec& exec) {
  return std::make_unique<Demo>(config, exec);
}

std::vector<FlatRange> tile_rows(std::span<const Parameter> list, int side) {
  std::vector<FlatRange> all;
  for (const Parameter& p : list) {
    const LocalShard shard = local_shard(p);
    if (!p.sharding.over_tp() || shard.rows == 0 || shard.columns == 0) continue;
    const int64_t rows = p.shape.size() > 1 ? p.shape[0] : 1;
    const int64_t height = DctTiles::of(rows, p.shape.back(), side).height;
    for (int64_t row = 0; row < shard.rows; row += height) {
      all.push_back({p.offset + row * shard.columns, height * shard.columns});
    }
  }
  std::ranges::sort(all, {}, &FlatRange::begin);
  return all;
}

}  // namespace tandem
