// The kernel of encoded.h.
#pragma once

#include <algorithm>
#include <optional>

#include "codec/message.h"
#include "codec/numbers.h"
#include "gemm/cuda/product_launch.cuh"
#include "overlap/gemm_rs/cuda/encoded_block.cuh"

namespace tandem::gpu::fused {

template <class Element, class Tile>
class EncodedRs final : public EncodedRsKernel {
  using Block = EncodedRsBlock<Element, Tile>;
  using Params = typename Block::Params;
  using Partials = PartialsMemory<Block, Element>;
  static_assert(Block::kTileColumns == AddingShape::tile_columns(dtype_of<Element>()));
  static_assert(AddingKernel::kLeastK >= Block::kLead * Block::kStepOfK);
  static constexpr const char* kName = "encoded gemm_rs";

 public:
  explicit EncodedRs(const AddingShape& shape) : shape_(shape) {
    const int clusters = resident_clusters<Block>(kName);
    int slots = 0;
    for (const bool between : {false, true}) {
      Layout& layout = layouts_[between];
      layout.order =
          adding_order<Block>(shape_, {.between = between}, clusters, Partials::kPossible);
      slots = std::max(slots, partial_slots(waves_of(layout.order), layout.order.split));
      layout.works = Works(schedule::RsPieces(layout.order));
    }
    partials_.emplace(slots);
  }

  size_t slice_bytes() const override { return Tile::kSliceBytes; }
  bool has_between() const override {
    return layouts_[1].order.own_at_end() != layouts_[1].order.shard_tiles();
  }
  void launch(const EncodedRsJob& job, cudaStream_t stream) override {
    if (!same(job)) prepare(job);
    launch_product<Block>(params_, params_.order.clusters, kName, stream);
  }

 private:
  using Works = WorkTable<schedule::PieceWork>;
  struct Layout {
    schedule::RsPieceOrder order;
    Works works;
  };

  bool same(const EncodedRsJob& job) const {
    return prepared_ && job.x == params_.job.x && job.weight == params_.job.weight &&
           job.out == params_.job.out && job.between == params_.job.between &&
           job.watch.deadline_ns == params_.job.watch.deadline_ns;
  }

  void prepare(const EncodedRsJob& job) {
    const Layout& layout = layouts_[job.between];
    Params& params = params_;
    params.x = map_of<Element>(job.x, shape_.m, shape_.k, Block::kTileRows);
    params.weight =
        map_of<Element>(job.weight, shape_.n, shape_.k, Block::kTileColumns / Block::kCluster);
    params.out = map_of<Element>(job.out, shape_.shard_rows(), shape_.n, Block::kGroupRows);
    params.partials = partials_->memory();
    params.order = layout.order;
    params.works = layout.works.data();
    params.works_of_cluster = layout.works.of_cluster;
    params.shard_rows = int(shape_.shard_rows());
    params.slices_of_shard = int(shape_.slices());
    params.every = steps_between_boxes<Block>(layout.order);
    params.limit = codec::largest_of(shape_.result);
    params.job = job;
    prepared_ = true;
  }

  AddingShape shape_;
  Layout layouts_[2];  // own tiles last, or between the others'
  std::optional<Partials> partials_;
  Params params_{};
  bool prepared_ = false;
};

}  // namespace tandem::gpu::fused
