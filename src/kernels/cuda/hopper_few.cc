#include "kernels/cuda/hopper_few.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "core/cuda/share.h"
#include "gemm/cuda/tensor_map.h"
#include "kernels/cuda/hopper_chunks.h"
#include "kernels/cuda/sm90/attention_kernels.h"
#include "kernels/cuda/sm90/few_kernels.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

static_assert(sm90::kSinglePage == kPageTokens && sm90::kMaxFewCluster == kMaxCluster);

/// Blocks of a cluster where bits may not depend on the number of rows: more are slower for many
/// rows, fewer for long texts.
constexpr int invariant_cluster(int64_t max_tokens) {
  return max_tokens <= 8192 ? 4 : 8;
}
/// With fewer blocks the GPU is idle; tokens that a block may have then.
constexpr int64_t kMinBlocks = 64, kMaxShare = 2048;

constexpr std::array kClusters{1, 2, 4, 8, 16};
static_assert(kClusters.back() == kMaxCluster);

/// Clusters of kClusters blocks that run at the same time on this thread's GPU.
const std::array<int, kClusters.size()>& count_resident(int64_t head_dim) {
  // The GPU of a thread rarely changes.
  thread_local int device = -1;
  thread_local std::array<int, kClusters.size()> counts[2];
  if (const int current = this_share()->device(); current != device) {
    for (size_t i = 0; i < kClusters.size(); ++i) {
      counts[0][i] = sm90::resident_few_clusters(64, kClusters[i]);
      counts[1][i] = sm90::resident_few_clusters(128, kClusters[i]);
    }
    device = current;
  }
  return counts[head_dim == 128];
}

int64_t num_clusters(const PagedShape& shape, int64_t rows) {
  return rows * shape.kv_heads * sm90::blocks_of_group(int(shape.heads / shape.kv_heads));
}

/// The largest cluster of which all run at the same time.
int choose_cluster(const PagedShape& shape, int64_t rows) {
  if (shape.cluster > 0) return shape.cluster;
  if (shape.batch_invariant) return invariant_cluster(shape.max_tokens);
  const auto& resident = count_resident(shape.head_dim);
  const int64_t needed = num_clusters(shape, rows);
  const auto found =
      std::ranges::find_if(resident.rbegin(), resident.rend(), [&](int n) { return n >= needed; });
  return found == resident.rend() ? 1 : kClusters[size_t(resident.rend() - found) - 1];
}

void check_room(const PagedShape& shape) {
  const auto found = std::ranges::find(kClusters, shape.cluster);
  if (count_resident(shape.head_dim)[size_t(found - kClusters.begin())] > 0) return;
  throw Unsupported("paged_attention: clusters of " + std::to_string(shape.cluster) +
                    " blocks: this GPU has no room for one");
}

}  // namespace

bool takes_hopper_few(const PagedShape& shape, int64_t window, const PagedRows& rows,
                      int64_t singles) {
  // Ranks that share a GPU may not have SMs for clusters.
  if (singles == 0 || shape.cluster == kNoCluster || !has_hopper_pages(shape.head_dim) ||
      !this_share()->alone()) {
    return false;
  }
  if (shape.cluster != 0) {
    check_room(shape);
    return true;
  }
  const bool is_fixed = shape.batch_invariant;
  if (!is_fixed && singles >= kManySingles) return false;
  const int64_t counted = is_fixed ? 1 : singles;
  const int64_t cluster = choose_cluster(shape, counted);
  int64_t keys = is_fixed || rows.longest == 0 ? shape.max_tokens : rows.longest;
  if (window > 0) keys = std::min(keys, window);
  return num_clusters(shape, counted) * cluster >= kMinBlocks || keys <= cluster * kMaxShare;
}

void attend_hopper_few(cudaStream_t stream, const PagedShape& shape, const RopeTable& rope,
                       int64_t window, const PagedRows& rows, int64_t singles,
                       const PagedTensors& t) {
  const int64_t num_pages = t.keys.dim(0), width = shape.kv_heads * shape.head_dim;
  const auto map_pages = [&](const Tensor& tensor) {
    return map_rows(tensor.data(), DType::bf16, num_pages, kPageTokens, width, width,
                    int(kPageTokens));
  };
  using Element = __nv_bfloat16;
  const sm90::FewParams params{
      .keys = map_pages(t.keys),
      .values = map_pages(t.values),
      .sequences = rows.sequences.as<int32_t>(),
      .positions = rows.positions.as<int32_t>(),
      .pages = rows.pages.as<int32_t>(),
      .pages_of_line = rows.pages.stride(0),
      .q = static_cast<const Element*>(t.q.data()),
      .k = static_cast<const Element*>(t.k.data()),
      .v = static_cast<const Element*>(t.v.data()),
      .q_stride = t.q.stride(0),
      .k_stride = t.k.stride(0),
      .v_stride = t.v.stride(0),
      .out = static_cast<Element*>(t.out.data()),
      .out_stride = t.out.stride(0),
      .cached_keys = static_cast<Element*>(t.keys.data()),
      .cached_values = static_cast<Element*>(t.values.data()),
      .cos = rope.cos(0),
      .sin = rope.sin(0),
      .heads = int(shape.heads),
      .kv_heads = int(shape.kv_heads),
      .window = int(window),
      .cluster = choose_cluster(shape, singles),
      .scale_log2 = float(sm90::kLog2E / std::sqrt(double(shape.head_dim)))};
  sm90::launch_few(int(shape.head_dim), rows.distinct_sequences, int(singles), params, stream);
}

}  // namespace tandem::gpu
