// The launching side of arriving_block.cuh.
#pragma once

#include <map>
#include <optional>

#include "gemm/cuda/product_launch.cuh"
#include "overlap/ag_gemm/cuda/arriving_block.cuh"

namespace tandem::gpu::fused {

template <class Operand, class Element, class Rows = WholeTiles, class Courier = ShardCourier>
class Arriving final : public FusedAgKernel {
  using Block = ArrivingBlock<Operand, Element, Rows, Courier>;
  using Table = WorkTable<schedule::AgWork>;
  using Partials = PartialsMemory<Block, Element>;
  static_assert(kLeastHandWrittenK >= Block::kLead * Block::kStepOfK);
  using Params = typename Block::Params;
  static constexpr const char* kName = "hand-written fused ag_gemm";

 public:
  explicit Arriving(const FusedAgShape& shape)
      : shape_(shape),
        order_(order_of(shape)),
        partials_(schedule::partial_slots(waves_of(order_), order_.split)) {
    for (const int head : shape.heads) {
      if (tables_.contains(head)) continue;
      schedule::AgWaveOrder order = order_;
      order.rows.head = head_columns(order.rows.column_tiles, head);
      tables_.emplace(head, Table(order));
    }
  }

  void launch(const FusedAgJob& job, cudaStream_t stream) override {
    if (!last_ || !is_launched_alike(job, *last_)) prepare(job);
    launch_product<Block>(params_, order_.clusters, kName, stream);
  }
  RecordedTiles recorded_tiles() const override {
    if (!kDeviceTimeline) return {};
    return {order_.rows.row_tiles(), order_.rows.column_tiles};
  }

 private:
  static schedule::AgWaveOrder order_of(const FusedAgShape& shape) {
    constexpr int kPairRows = Block::kCluster * Block::kTileRows;
    constexpr int kSwept = schedule::kSweptRows / kPairRows;
    schedule::AgWaveOrder order;
    order.rows = {shape.rank, shape.ranks, int(shape.m / shape.ranks / Block::kTileRows),
                  int((shape.n + Block::kTileColumns - 1) / Block::kTileColumns), 0};
    if constexpr (Rows::kAny) {
      const auto shards = schedule::shard_rows(shape.m, shape.ranks);
      const int tiles = (shards.most() + Block::kTileRows - 1) / Block::kTileRows;
      // The last one of a pair may be empty.
      order.rows.shard_tiles = tiles == 1 && shape.ranks % 2 == 0 ? 1 : (tiles + 1) / 2 * 2;
      order.shorter = schedule::shards_with_fewer_tiles(shards, shape.ranks, kPairRows);
      order.band = schedule::even_band(in_pairs_of_rows(order.rows).shard_tiles, kSwept);
    } else {
      order.band = schedule::swept_rows(in_pairs_of_rows(order.rows).shard_tiles, kSwept);
    }
    order.steps = int((shape.k + Block::kStepOfK - 1) / Block::kStepOfK);
    order.least = Block::kLead;
    if (Block::Product::kFp8) order.rows_in_a_wave = 8;
    order.clusters = resident_clusters<Block>(kName);
    if (Partials::kPossible) order.split = best_split(waves_of(order));
    if (order.split.tiles == 0) order.clusters = std::min(order.clusters, waves_of(order).tiles);
    return order;
  }

  void prepare(const FusedAgJob& job) {
    Params params;
    const Table& table = tables_.at(job.head);
    const auto shards = schedule::shard_rows(shape_.m, shape_.ranks);
    constexpr int kHalf = Block::kTileColumns / Block::kCluster;
    params.own = map_of<Operand>(job.own, shards.count(shape_.rank), shape_.k, Block::kTileRows);
    params.gathered = map_of<Operand>(job.gathered, shape_.m, shape_.k, Block::kTileRows);
    params.weight = map_of<Operand>(job.weight, shape_.n, shape_.k, kHalf);
    if constexpr (Rows::kAny) {
      for (int r = 0; r < shape_.ranks; ++r) {
        auto* rows = static_cast<Element*>(job.out) + shards.begin(r) * shape_.n;
        params.outs[r] = map_of<Element>(rows, shards.count(r), shape_.n, Block::kGroupRows);
      }
      params.shards = shards;
      params.longer = job.longer;
      params.bias = job.bias;
    } else {
      params.out = map_of<Element>(job.out, shape_.m, shape_.n, Block::kGroupRows);
    }
    params.partials = partials_.memory();
    params.works = table.data();
    params.works_of_cluster = table.of_cluster;
    params.rank = shape_.rank;
    params.shard_tiles = order_.rows.shard_tiles;
    params.steps = order_.steps;
    params.chunk_steps = job.gate.chunk_bytes / kStepBytes;
    params.scales = job.scales;
    params.columns = int(shape_.n);
    if constexpr (kDeviceTimeline) params.timeline = job.timeline;
    params.gate = job.gate;
    if constexpr (std::is_same_v<typename Courier::Route, EncodedShardRoute>) {
      params.route = job.encoded;
    } else {
      params.route = job.route;
    }
    params.route.groups = std::min(params.route.groups, order_.clusters * Block::kCluster);
    params_ = params;
    last_ = job;
  }

  FusedAgShape shape_;
  schedule::AgWaveOrder order_;  // with no head
  std::map<int, Table> tables_;  // by head
  Partials partials_;
  Params params_{};
  std::optional<FusedAgJob> last_;  // what params_ are of
};

}  // namespace tandem::gpu::fused
