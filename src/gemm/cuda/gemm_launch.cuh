// Host side of gemm_block.cuh: number of clusters, their work items, split-K partials, and the
// launch.
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "core/cuda/check.h"
#include "core/cuda/handles.h"
#include "core/cuda/upload.h"
#include "gemm/cuda/gemm_block.cuh"
#include "gemm/cuda/tensor_map.h"
#include "schedule/tile.h"
#include "schedule/wave_split.h"

namespace tandem::gpu::fused {

template <class Block>
__global__ __launch_bounds__(Block::kThreads, 1)
    __cluster_dims__(Block::kCluster, 1,
                     1) void gemm_kernel(const __grid_constant__ typename Block::Params params) {
  extern __shared__ std::byte memory[];
  Block::run(params, memory);
}

/// Number of clusters that are resident at the same time, as required since they wait for each
/// other. `name`: for errors.
template <class Block>
int resident_clusters(const char* name) {
  check(cudaFuncSetAttribute(gemm_kernel<Block>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             Block::kSharedBytes),
        name);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Block::kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = Block::kCluster;
  config.blockDim = Block::kThreads;
  config.dynamicSmemBytes = Block::kSharedBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, gemm_kernel<Block>, &config), name);
  if (clusters == 0) throw DeviceError(std::string(name) + ": this GPU has no room for a block");
  return this_share()->clusters(clusters, Block::kCluster);
}

/// `concurrent`: runs concurrently with the preceding kernel of the stream (concurrent.cuh).
template <class Block>
void launch_gemm(const typename Block::Params& params, int clusters, const char* name,
                 cudaStream_t stream, bool concurrent = false) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(clusters * Block::kCluster);
  config.blockDim = Block::kThreads;
  config.dynamicSmemBytes = Block::kSharedBytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = concurrent ? 1 : 0;
  check(cudaLaunchKernelEx(&config, gemm_kernel<Block>, params), name);
}

/// Work items of each cluster, computed on the host, where divisions are cheap.
template <class Work>
struct WorkTable {
  int of_cluster = 0;  ///< work items, including the last one, whose end is 0
  DeviceMemory work_items;

  WorkTable() = default;
  template <class Order>
  explicit WorkTable(const Order& order) {
    std::vector<std::vector<Work>> all(size_t(order.clusters));
    for (int cluster = 0; cluster < order.clusters; ++cluster) {
      auto& local = all[size_t(cluster)];
      do {
        local.push_back(work_at(order, cluster, int(local.size())));
      } while (local.back().end != 0);
      of_cluster = std::max(of_cluster, int(local.size()));
    }
    std::vector<Work> table;
    for (auto& local : all) {
      local.resize(size_t(of_cluster));
      table.insert(table.end(), local.begin(), local.end());
    }
    work_items = uploaded(table);
  }
  const Work* data() const { return reinterpret_cast<const Work*>(work_items.data()); }
};

template <class Element>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<Element, __half>) return DType::f16;
  if constexpr (std::is_same_v<Element, __nv_fp8_e4m3>) return DType::e4m3;
  return DType::bf16;
}

template <class Element>
CUtensorMap map_of(const void* data, int64_t rows, int64_t columns, int box_rows) {
  return map_matrix(data, dtype_of<Element>(), rows, columns, box_rows);
}

/// Map of a weight in the boxes of StageFiller::load_step: [n, k], or [k, n] if it is transposed.
template <class Tiles>
CUtensorMap map_weight(const void* weight, int64_t n, int64_t k) {
  using Operand = typename Tiles::Operand;
  if constexpr (Tiles::kOptions.weight_transposed) {
    return map_of<Operand>(weight, k, n, Tiles::kStepOfK);
  } else {
    return map_of<Operand>(weight, n, k, Tiles::kTileColumns / Tiles::kCluster);
  }
}

/// Memory for `slots` split-K partials (schedule::partial_slots).
template <class Tiles>
class PartialsMemory {
  using Element = typename Tiles::Element;
  static int rows(int slots) { return SplitPartials<Tiles>::row(slots * Tiles::kCluster, 0); }

 public:
  /// A partial is stored as hi + lo in Element, and the sum over part of K may exceed f16.
  static constexpr bool kPossible = !std::is_same_v<Element, __half>;

  // At least one slot: an empty tensor map cannot be made.
  explicit PartialsMemory(int slots)
      : rows_(rows(std::max(slots, 1))),
        sums_(size_t(rows_) * Tiles::kTileColumns * sizeof(Element)),
        count_(size_t(std::max(slots, 1) * Tiles::kCluster) * sizeof(uint64_t)) {}
  SplitPartials<Tiles> memory() const {
    return {map_of<Element>(sums_.data(), rows_, Tiles::kTileColumns, Tiles::kGroupRows),
            reinterpret_cast<uint64_t*>(count_.data())};
  }

 private:
  int rows_;
  DeviceMemory sums_, count_;
};

}  // namespace tandem::gpu::fused
