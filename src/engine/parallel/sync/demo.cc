#include "engine/parallel/sync/demo.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "engine/parallel/sync/raw_values.h"
#include "kernels/dct.h"
#include "tandem/error.h"

namespace tandem {
namespace {

void update_demo(const Exec& /*exec*/, const AdamStep& step, bool decay, double /*trust_ratio*/,
                 const AdamState& state, const Tensor& gradient, const Tensor& /*working*/) {
  const float shrink = decay ? 1 - step.lr * step.weight_decay : 1;
  const float scale = step.lr * step.gradient_scale;
  auto *const weights = state.w.as<float>(), *const scaled = state.v.as<float>();
  const auto* const from = gradient.as<const float>();
  for (int64_t i = 0; i < state.w.elements(); ++i) {
    weights[i] *= shrink;
    scaled[i] = scale * from[i];
  }
}

class Demo : public Exchange {
 public:
  explicit Demo(const SyncConfig& config) : config_(config) {}

  size_t max_bytes(const SyncShard& shard) const override {
    size_t bytes = 0;
    for_each(shard, [&](const Segment& segment) { bytes += segment.bytes; });
    return bytes;
  }

  size_t encode(const SyncShard& shard, const Tensor& changes, const Tensor& unsent,
                std::byte* message) override {
    std::byte* to = message;
    for_each(shard, [&](const Segment& segment) {
      const Tensor values = changes.narrow(0, segment.begin, segment.count);
      if (segment.sharded) {
        const Tensor cosines = scratch(segment.count);
        dct_forward({}, segment.tiles, 1, values, cosines);
        encode_topk({}, segment.topk, float(config_.decay()), cosines,
                    unsent.narrow(0, segment.begin, segment.count), to);
      } else {
        write_raw(values, to);
      }
      to += segment.bytes;
    });
    return size_t(to - message);
  }

  void combine(const SyncShard& shard, std::span<const std::byte* const> messages,
               const Tensor& mean) const override {
    std::vector<const std::byte*> from(messages.begin(), messages.end());
    for_each(shard, [&](const Segment& segment) {
      const Tensor values = mean.narrow(0, segment.begin, segment.count);
      if (segment.sharded) {
        const Tensor cosines = scratch(segment.count);
        mean_topk({}, segment.topk, from, codec::TopKMean::senders, cosines);
        dct_inverse({}, segment.tiles, cosines, values);
      } else {
        mean_raw(from, values);
      }
      for (float& value : std::span(values.as<float>(), size_t(segment.count))) {
        if (!std::isnan(value)) value = float(value > 0) - float(value < 0);
      }
      for (const std::byte*& message : from) message += segment.bytes;
    });
  }

 private:
  /// A parameter.
  struct Segment {
    int64_t begin = 0, count = 0;
    bool sharded = false;
    DctTiles tiles = {};  // this and the next only if sharded
    codec::TopK topk = {};
    size_t bytes = 0;
  };

  template <typename Visit>
  void for_each(const SyncShard& shard, const Visit& visit) const {
    for (size_t i = 0; i < shard.slices.size();) {
      const SyncSlice& first = shard.slices[i];
      Segment segment{.begin = first.begin, .sharded = first.sharded};
      for (; i < shard.slices.size() && shard.slices[i].parameter == first.parameter; ++i) {
        segment.count += shard.slices[i].count;
      }
      if (segment.count != first.rows * first.columns) {
        throw InvalidArgument(fmt::format("demo: {} elements of parameter {}: expected all {}",
                                          segment.count, first.parameter,
                                          first.rows * first.columns));
      }
      segment.bytes = size_t(segment.count) * sizeof(float);
      if (segment.sharded) {
        segment.tiles = DctTiles::of(first.rows, first.columns, config_.tile_side());
        segment.topk = config_.sparse(segment.tiles.elements());
        segment.bytes = size_t(segment.topk.bytes(segment.count));
      }
      visit(segment);
    }
  }

  Tensor scratch(int64_t elements) const {
    scratch_.resize(std::max(scratch_.size(), size_t(elements)));
    return Tensor::of(std::span(scratch_).first(size_t(elements)), {elements});
  }

  const SyncConfig config_;
  mutable std::vector<float> scratch_;
};

}  // namespace

const Optimizer kDemoOptimizer{"demo", update_demo};

std::unique_ptr<Exchange> make_demo_exchange(const SyncConfig& config) {
  return std::make_unique<Demo>(config);
}

}  // namespace tandem
