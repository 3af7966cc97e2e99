// The host's side of grouped_block.cuh.
#pragma once

#include <algorithm>
#include <optional>

#include "gemm/cuda/grouped_block.cuh"
#include "gemm/cuda/product_launch.cuh"

namespace tandem::gpu::fused {

template <class Element, bool kGathers, bool kGates>
class Grouped final : public GroupedGemm {
  using Block = GroupedBlock<Element, kGathers, kGates>;
  static constexpr const char* kName = "grouped GEMM";

 public:
  explicit Grouped(const GroupedShape& shape) : shape_(shape) {
    const auto parts = [](int64_t all, int part) { return int((all + part - 1) / part); };
    table_.blocks = resident_clusters<Block>(kName);
    table_.column_tiles = parts(shape.columns, Block::kStoredColumns);
    // The store of the tile before is hidden under so many k-blocks; those past K read zeros.
    table_.steps = std::max(parts(shape.k, Block::kStepOfK), int(Block::kLead));
    const int64_t tiles = int64_t(shape.row_tiles()) * table_.column_tiles;
    table_.works_of_block = parts(tiles, table_.blocks) + 1;
    works_ = DeviceMemory(size_t(table_.blocks) * size_t(table_.works_of_block) *
                          sizeof(schedule::GroupedWork));
    table_.works = reinterpret_cast<schedule::GroupedWork*>(works_.data());
  }

  const GroupedTable& table() const override { return table_; }

  void launch(const GroupedJob& job, cudaStream_t stream) override {
    if (shape_.rows == 0) return;
    if (!last_ || !(job == *last_)) prepare(job);
    launch_product<Block>(params_, table_.blocks, kName, stream);
  }

 private:
  void prepare(const GroupedJob& job) {
    typename Block::Params params{};
    if (!kGathers) {
      params.x = map_of<Element>(job.x, shape_.padded_rows(), shape_.k, Block::kTileRows);
    }
    params.weight = map_of<Element>(job.weight, shape_.weight_rows(), shape_.k, Block::kHalf);
    params.out = map_of<Element>(job.out, shape_.padded_rows(), shape_.columns, Block::kGroupRows);
    params.works = table_.works;
    params.works_of_cluster = table_.works_of_block;
    params.group_rows = int(shape_.weight_rows() / shape_.groups);
    params.to_high = kGates ? int(shape_.columns) : Block::kHalf;
    params.rows = static_cast<const std::byte*>(job.x);
    params.source = job.source;
    params.row_bytes = shape_.k * int64_t(sizeof(Element));
    params_ = params;
    last_ = job;
  }

  GroupedShape shape_;
  GroupedTable table_;
  DeviceMemory works_;
  typename Block::Params params_{};
  std::optional<GroupedJob> last_;  // what params_ are of
};

template <class Element>
std::unique_ptr<GroupedGemm> make_grouped(const GroupedShape& shape) {
  if (shape.gathered) {
    if (shape.gated) return std::make_unique<Grouped<Element, true, true>>(shape);
    return std::make_unique<Grouped<Element, true, false>>(shape);
  }
  if (shape.gated) return std::make_unique<Grouped<Element, false, true>>(shape);
  return std::make_unique<Grouped<Element, false, false>>(shape);
}

}  // namespace tandem::gpu::fused
