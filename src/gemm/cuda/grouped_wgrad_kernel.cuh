// The host's side of grouped_wgrad_block.cuh.
#pragma once

#include <algorithm>

#include "gemm/cuda/gemm_launch.cuh"
#include "gemm/cuda/grouped_wgrad_block.cuh"

namespace tandem::gpu::fused {

template <class Element>
class Wgrad final : public GroupedWgrad {
  using Block = WgradBlock<Element>;
  static constexpr const char* kName = "gradients of grouped weights";

 public:
  explicit Wgrad(const WgradShape& shape)
      : shape_(shape), blocks_(resident_clusters<Block>(kName)) {
    params_.groups = shape.groups;
    params_.row_tiles = parts(shape.rows, Block::kTileRows);
    params_.column_tiles = parts(shape.columns, Block::kTileColumns);
    params_.rows = int(shape.rows);
    params_.columns = int(shape.columns);
  }

  void launch(const WgradJob& job, cudaStream_t stream) override {
    if (shape_.padded_rows == 0) return;
    params_.dy = map_of<Element>(job.dy, shape_.padded_rows, shape_.rows, Block::kStepRows);
    params_.x = map_of<Element>(job.x, shape_.padded_rows, shape_.columns, Block::kStepRows);
    params_.group_rows = job.group_rows;
    params_.dweight = job.dweight;
    const int64_t tiles = int64_t(shape_.groups) * params_.row_tiles * params_.column_tiles;
    launch_gemm<Block>(params_, int(std::min<int64_t>(blocks_, tiles)), kName, stream);
  }

 private:
  static int parts(int64_t all, int part) { return int((all + part - 1) / part); }

  WgradShape shape_;
  int blocks_;
  typename Block::Params params_{};
};

}  // namespace tandem::gpu::fused
