// Gradients of grouped weights (grouped_wgrad.h): a GemmBlock (gemm_block.cuh) on tiles of 128 x
// 256 of a group's weight. A k-block is 64 of the group's rows: both operands, dy and x, are
// transposed as stored. Tiles are distributed round-robin over the blocks, group by group; groups
// without rows are skipped, and if gradients are stored, cleared by a kernel before. Nothing is
// staged: the multiplying threads write their sums to memory, while loading proceeds with the next
// tile.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "core/cuda/check.h"
#include "gemm/cuda/gemm_launch.cuh"
#include "gemm/cuda/grouped_wgrad.h"
#include "tandem/error.h"

namespace tandem::gpu::fused {

/// Writing of a tile's sums.
enum class WgradOutput : uint8_t { add_f32, store_f32, store_operand };

/// Pair of adjacent sums.
template <WgradOutput kOutput, class Operand>
__device__ void write_pair(void* dweight, int64_t at, float first, float second) {
  if constexpr (kOutput == WgradOutput::store_operand) {
    const Operand pair[2] = {Operand(first), Operand(second)};
    uint32_t bits;
    memcpy(&bits, pair, sizeof bits);
    static_cast<uint32_t*>(dweight)[at / 2] = bits;
    return;
  }
  float* const to = static_cast<float*>(dweight) + at;
  if constexpr (kOutput == WgradOutput::store_f32) {
    *reinterpret_cast<float2*>(to) = float2{first, second};
  } else {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(first),
                 "f"(second)
                 : "memory");
  }
}

/// Block (x, y) clears slice y of group x's gradient, of `vectors` 16-byte vectors, if it has no
/// rows.
template <class Operand>
__global__ void clear_empty_groups(const schedule::GroupRows* group_rows, void* dweight,
                                   int64_t vectors) {
  if (group_rows[blockIdx.x].rows > 0) return;
  uint4* const to = static_cast<uint4*>(dweight) + int64_t(blockIdx.x) * vectors;
  const int64_t stride = int64_t(gridDim.y) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.y) * blockDim.x + threadIdx.x; i < vectors; i += stride) {
    to[i] = uint4{};
  }
}

template <class Operand>
struct WgradRoles {
  // ---- Configuration ---------------------------------------------------------------------------

  using Tiles =
      GemmTiles<Operand, Operand,
                TileOptions{
                    .cluster = 1, .buffers = 0, .x_transposed = true, .weight_transposed = true}>;
  using Shared = typename Tiles::Shared;
  static constexpr int kBoxColumns = kStepBytes / int(sizeof(Operand));  // per operand box
  /// Row tiles of a weight that are swept together.
  static constexpr int kBand = 8;

  struct Params : OptionalLog {
    CUtensorMap dy, x;
    const schedule::GroupRows* group_rows;
    void* dweight;
    WgradOutput output;
    int groups, row_tiles, column_tiles;
    int rows, columns;
  };

  struct Work : WholeTile {
    int group, row, column;
    int first;  // first row of the group
    int end;
    __device__ Work(int group, const schedule::GroupRows& rows, const schedule::Tile& tile)
        : group(group),
          row(tile.row * Tiles::kTileRows),
          column(tile.column * Tiles::kTileColumns),
          first(rows.first),
          end((rows.rows + Tiles::kStepOfK - 1) / Tiles::kStepOfK) {}
    __device__ auto tile_coord() const { return cute::make_coord(row, column); }
  };

  template <class Body>
  __device__ static void for_each_work(const Params& params, Body&& body) {
    const int tiles = params.row_tiles * params.column_tiles;
    int group = 0, at = int(blockIdx.x);
    while (true) {
      for (; at >= tiles; at -= tiles) ++group;
      if (group >= params.groups) return;
      const schedule::GroupRows rows = params.group_rows[group];
      if (rows.rows > 0) {
        body(Work(group, rows,
                  schedule::grouped_tile(at, params.row_tiles, params.column_tiles, kBand)));
      }
      at += int(gridDim.x);
    }
  }

  __device__ static void open(const Params&, Shared&) {}

  // ---- Loading thread ---------------------------------------------------------------------------

  class Source {
   public:
    static constexpr int kCopyingLanes = 0;

    __device__ Source(const Params& params, Shared&) : params_(params) {}

    __device__ void begin(const Work&) const {}
    __device__ void load_step(StageFiller<Tiles>& stages, const Work& work, int number) const {
      uint64_t* const full = stages.begin(Tiles::kXBytes + Tiles::kWeightBytes);
      const int row = work.first + number * Tiles::kStepOfK;
      const auto boxes = [&]<int kCount>(const CUtensorMap& map, std::byte* to, int column) {
#pragma unroll
        for (int box = 0; box < kCount; ++box) {
          cute::SM90_TMA_LOAD_2D::copy(&map, full, stages.kNormal, to + box * kTransposedBox,
                                       column + box * kBoxColumns, row);
        }
      };
      boxes.template operator()<Tiles::kTileRows / kBoxColumns>(params_.dy, stages.x(), work.row);
      boxes.template operator()<Tiles::kTileColumns / kBoxColumns>(params_.x, stages.weight(),
                                                                   work.column);
      stages.end();
    }
    __device__ void end(const Work&) const {}
    __device__ void close() const {}

   private:
    const Params& params_;
  };

  // ---- Storing, by the multiplying threads ------------------------------------------------------

  class Sink : public DirectSink {
   public:
    class Tile {
     public:
      struct Words {};
      __device__ Tile(Shared&, const GroupThread& at, Words&) : at_(at) {}

      static constexpr bool is_waiting() { return false; }
      __device__ static void write_box(int) {}
      /// Each thread's sums cover two rows, 8 apart, and pairs of columns, 8 apart.
      __device__ void take(const Params& params, const Work& work,
                           const float (&sums)[Tiles::kSums]) const {
        switch (params.output) {
          case WgradOutput::add_f32:
            return write<WgradOutput::add_f32>(params, work, sums);
          case WgradOutput::store_f32:
            return write<WgradOutput::store_f32>(params, work, sums);
          case WgradOutput::store_operand:
            return write<WgradOutput::store_operand>(params, work, sums);
        }
      }

     private:
      template <WgradOutput kOutput>
      __device__ void write(const Params& params, const Work& work,
                            const float (&sums)[Tiles::kSums]) const {
        const int row = work.row + at_.group * Tiles::kGroupRows + 16 * at_.warp + at_.lane / 4;
        const int column = work.column + 2 * (at_.lane % 4);
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
          const int at = row + 8 * lower;
          if (at >= params.rows) continue;
          const int64_t first = (int64_t(work.group) * params.rows + at) * params.columns;
#pragma unroll
          for (int i = 0; i < Tiles::kSums / 4; ++i) {
            if (column + 8 * i >= params.columns) continue;
            write_pair<kOutput, Operand>(params.dweight, first + column + 8 * i,
                                         sums[4 * i + 2 * lower], sums[4 * i + 2 * lower + 1]);
          }
        }
      }

      const GroupThread at_;
    };

    __device__ static int write_step(const Work&, int, int) {
      return 0;
    }
  };

  __device__ static void spare(const Params&, Shared&) {}
  __device__ static void close() {}
};

// ---- Launch ------------------------------------------------------------------------------------

template <class Element>
class Wgrad final : public GroupedWgrad {
  using Block = GemmBlock<WgradRoles<Element>>;
  using Tiles = typename Block::Tiles;
  static constexpr const char* kName = "gradients of grouped weights";

 public:
  explicit Wgrad(const WgradShape& shape)
      : shape_(shape), blocks_(resident_clusters<Block>(kName)) {
    params_.groups = shape.groups;
    params_.row_tiles = ceil_div(shape.rows, Tiles::kTileRows);
    params_.column_tiles = ceil_div(shape.columns, Tiles::kTileColumns);
    params_.rows = int(shape.rows);
    params_.columns = int(shape.columns);
  }

  void launch(const WgradArgs& args, cudaStream_t stream) override {
    const WgradOutput output = output_of(args);
    if (shape_.padded_rows == 0) {
      if (args.stores) clear_all(args, stream);
      return;
    }
    params_.dy = map_of<Element>(args.dy, shape_.padded_rows, shape_.rows, Tiles::kStepOfK);
    params_.x = map_of<Element>(args.x, shape_.padded_rows, shape_.columns, Tiles::kStepOfK);
    params_.group_rows = args.group_rows;
    params_.dweight = args.dweight;
    params_.output = output;
    if (args.stores) clear_empty(args, stream);
    const int64_t tiles = int64_t(shape_.groups) * params_.row_tiles * params_.column_tiles;
    launch_gemm<Block>(params_, int(std::min<int64_t>(blocks_, tiles)), kName, stream);
  }

 private:
  WgradOutput output_of(const WgradArgs& args) const {
    if (args.dtype == DType::f32) {
      return args.stores ? WgradOutput::store_f32 : WgradOutput::add_f32;
    }
    if (args.stores && args.dtype == shape_.dtype) return WgradOutput::store_operand;
    throw InvalidArgument(std::string(kName) + ": dtype " + std::string(name_of(args.dtype)) +
                          ": expected f32, or, if stored, " + std::string(name_of(shape_.dtype)));
  }
  int64_t bytes_of_group(const WgradArgs& args) const {
    return shape_.rows * shape_.columns * int64_t(size_of(args.dtype));
  }
  void clear_all(const WgradArgs& args, cudaStream_t stream) const {
    check(cudaMemsetAsync(args.dweight, 0, size_t(shape_.groups * bytes_of_group(args)), stream),
          kName);
  }
  void clear_empty(const WgradArgs& args, cudaStream_t stream) const {
    constexpr int kSlices = 16, kThreads = 256;
    const int64_t vectors = bytes_of_group(args) / 16;
    clear_empty_groups<Element><<<dim3(unsigned(shape_.groups), kSlices), kThreads, 0, stream>>>(
        args.group_rows, args.dweight, vectors);
    check(cudaGetLastError(), kName);
  }
  static int ceil_div(int64_t all, int divisor) { return int((all + divisor - 1) / divisor); }

  WgradShape shape_;
  int blocks_;
  typename Block::Params params_{};
};

}  // namespace tandem::gpu::fused
