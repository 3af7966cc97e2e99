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
  void prepare_segment(const Segment& segment) override {
    const size_t bytes = size_t(segment.count) * sizeof(float);
    if (bytes > cosines_.bytes()) cosines_ = Memory(bytes, exec().device);
  }
  size_t segment_bytes(const Segment& segment) const override {
    return size_t(topk_of(tiles_of(segment)).bytes(segment.count));
  }
  void encode_segment(const Segment& segment, const Tensor& changes, const Tensor& unsent,
                      std::byte* message) override {
    const DctTiles tiles = tiles_of(segment);
    const Tensor cosines = scratch(segment.count);
    dct_forward(exec(), tiles, 1, changes, cosines);
    encode_topk(exec(), topk_of(tiles), float(config_.decay()), cosines, unsent, message);
  }
  void combine_segment(const Segment& segment, std::span<const std::byte* const> messages,
                       const Tensor& mean) const override {
    const DctTiles tiles = tiles_of(segment);
    const Tensor cosines = scratch(segment.count);
    mean_topk(exec(), topk_of(tiles), messages, codec::TopKMean::senders, cosines);
    dct_inverse(exec(), tiles, cosines, mean);
  }

  DctTiles tiles_of(const Segment& segment) const {
    const auto& [first, count] = segment;
    if (count != first.rows * first.columns) {
      throw InvalidArgument(fmt::format("demo: {} elements of parameter {}: expected all {}", count,
                                        first.parameter, first.rows * first.columns));
    }
    return DctTiles::of(first.rows, first.columns, config_.tile_side());
  }
  codec::TopK topk_of(const DctTiles& tiles) const { return config_.sparse(tiles.elements()); }

  Tensor scratch(int64_t elements) const { return cosines_.view(DType::f32, {elements}); }

  const SyncConfig config_;
  Memory cosines_;  // of one segment
};

}  // namespace

const Optimizer kDemoOptimizer{"demo", update_demo};

std::unique_ptr<Exchange> make_demo_exchange(const SyncConfig& config, const Exec& exec) {
  return std::make_unique<Demo>(config, exec);
}

}  // namespace tandem
