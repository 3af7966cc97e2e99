#include "tests/gemm/cuda/rotated_gemm.h"

#include "core/cuda/load_module.cuh"
#include "gemm/cuda/gemm_launch.cuh"

namespace tandem::gpu::fused {
namespace {

struct RotatedWork {
  int row = 0, column = 0;  // tile indices of a cluster's first block
  int end = 0;              // k-blocks; 0: no work
};

/// Tiles in column-major order, dealt round-robin to the clusters.
struct RotatedOrder {
  int clusters, pairs, column_tiles, steps;
};
RotatedWork work_at(const RotatedOrder& order, int cluster, int index) {
  const int at = cluster + index * order.clusters;
  if (at >= order.pairs * order.column_tiles) return {};
  return {at % order.pairs * 2, at / order.pairs, order.steps};
}

template <class Element>
struct RotatedRoles {
  using Tiles = GemmTiles<Element, Element, TileOptions{}>;
  using Shared = typename Tiles::Shared;

  struct Params : OptionalLog {
    CUtensorMap x, weight, out;
    const RotatedWork* work_items;
    int items_of_cluster;
    int row_tiles, rotated;
  };
  struct Work : RotatedWork, WholeTile {
    __device__ Work(const Params&, const RotatedWork& work) : RotatedWork(work) {
      this->row += int(cute::block_rank_in_cluster());
    }
    __device__ auto tile_coord() const { return cute::make_coord(this->row, this->column); }
  };

  class Source {
   public:
    static constexpr int kCopyingLanes = 0;

    __device__ Source(const Params& params, Shared&) : params_(params) {}

    __device__ void begin(const Work& work) {
      row_ = (work.row + params_.rotated) % params_.row_tiles * Tiles::kTileRows;
    }
    __device__ void load_step(StageFiller<Tiles>& stages, const Work& work, int number) {
      stages.load_step(params_.x, params_.weight, direction_.step_of(work, number), row_,
                       work.column * Tiles::kTileColumns);
    }
    __device__ void end(const Work&) { direction_.reverse(); }
    __device__ void close() const {}

   private:
    const Params& params_;
    Serpentine direction_;
    int row_;
  };

  class Sink : public DirectSink {
   public:
    using Tile = RoundedTile<Tiles>;

    __device__ Sink(const Params& params, Shared&, int) : params_(params) {}

    __device__ static int write_step(const Work&, int, int box) { return box * Tiles::kEvery; }
    template <size_t kSums>
    __device__ static void finish(const Params&, const Work&, float (&sums)[kSums], int) {
#pragma unroll
      for (float& sum : sums) sum = fmaxf(sum, 0);
    }
    __device__ void store(TileStorer<Tiles>& storer, const Work& work) const {
      storer.store(params_.out, work.column * Tiles::kTileColumns, work.row * Tiles::kTileRows);
    }

   private:
    const Params& params_;
  };

  __device__ static void open(const Params&, Shared&) {}
  __device__ static void spare(const Params&, Shared&) {}
  __device__ static void close() {}
};

template <class Element>
void run(const void* x, const void* weight, void* out, int64_t m, int64_t n, int64_t k, int tiles,
         cudaStream_t stream) {
  using Block = GemmBlock<RotatedRoles<Element>>;
  using Tiles = typename Block::Tiles;
  constexpr const char* kName = "rotated GEMM";
  const auto ceil_div = [](int64_t all, int divisor) { return int((all + divisor - 1) / divisor); };
  const int row_tiles = ceil_div(m, Tiles::kTileRows);
  const RotatedOrder order{resident_clusters<Block>(kName), ceil_div(row_tiles, 2),
                           ceil_div(n, Tiles::kTileColumns), ceil_div(k, Tiles::kStepOfK)};
  const WorkTable<RotatedWork> work_items(order);
  typename Block::Params params{};
  params.x = map_of<Element>(x, m, k, Tiles::kTileRows);
  params.weight = map_of<Element>(weight, n, k, Tiles::kTileColumns / 2);
  params.out = map_of<Element>(out, m, n, Tiles::kGroupRows);
  params.work_items = work_items.data();
  params.items_of_cluster = work_items.of_cluster;
  params.row_tiles = row_tiles;
  params.rotated = tiles;
  launch_gemm<Block>(params, order.clusters, kName, stream);
  check(cudaStreamSynchronize(stream), kName);
}

}  // namespace
}  // namespace tandem::gpu::fused

namespace tandem::test {

void rotated_gemm(DType dtype, const void* x, const void* weight, void* out, int64_t m, int64_t n,
                  int64_t k, int tiles, cudaStream_t stream) {
  const auto run = dtype == DType::f16 ? gpu::fused::run<__half> : gpu::fused::run<__nv_bfloat16>;
  run(x, weight, out, m, n, k, tiles, stream);
}

}  // namespace tandem::test
