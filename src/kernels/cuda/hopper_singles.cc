#include "kernels/cuda/hopper_singles.h"

#include <algorithm>
#include <cmath>

#include "core/cuda/share.h"
#include "gemm/cuda/tensor_map.h"
#include "kernels/cuda/hopper_chunks.h"
#include "kernels/cuda/sm90/attention_kernels.h"
#include "kernels/cuda/sm90/single_kernels.h"

namespace tandem::gpu {

static_assert(sm90::kSinglePage == kPageTokens);

bool takes_hopper_singles(const PagedShape& shape, int64_t singles) {
  return !shape.batch_invariant && singles >= kManySingles && has_hopper_pages(shape.head_dim);
}

int64_t single_counters(const PagedShape& shape) {
  if (shape.batch_invariant) return 0;
  return shape.max_singles() * shape.kv_heads *
         sm90::blocks_of_group(int(shape.heads / shape.kv_heads));
}

void attend_hopper_singles(cudaStream_t stream, const PagedShape& shape, int64_t window,
                           const PagedRows& rows, int64_t singles, const PagedTensors& t,
                           float* sums, int* counters) {
  const int64_t num_pages = t.keys.dim(0), width = shape.kv_heads * shape.head_dim;
  const auto map_pages = [&](const Tensor& tensor) {
    return map_rows(tensor.data(), DType::bf16, num_pages, kPageTokens, width, width,
                    int(kPageTokens));
  };
  const int64_t splits = sm90::max_splits(rows.longest > 0 ? rows.longest : shape.max_tokens);
  sm90::SingleParams params{.keys = map_pages(t.keys),
                            .values = map_pages(t.values),
                            .sequences = nullptr,
                            .positions = nullptr,
                            .pages = rows.pages.as<int32_t>(),
                            .pages_of_line = rows.pages.stride(0),
                            .q = nullptr,
                            .q_stride = t.q.stride(0),
                            .out = nullptr,
                            .stride = t.out.stride(0),
                            .sums = sums,
                            .scales = nullptr,
                            .counters = counters,
                            .rows = 0,
                            .heads = int(shape.heads),
                            .kv_heads = int(shape.kv_heads),
                            .window = int(window),
                            .splits = int(splits),
                            .scale_log2 = float(sm90::kLog2E / std::sqrt(double(shape.head_dim))),
                            .sms = this_share()->sms()};
  for (int64_t first = 0; first < singles; first += sm90::kSingleRows) {
    params.rows = int(std::min(singles - first, int64_t(sm90::kSingleRows)));
    params.sequences = rows.sequences.as<int32_t>() + first;
    params.positions = rows.positions.as<int32_t>() + first;
    params.q = static_cast<const __nv_bfloat16*>(t.q.data()) + first * params.q_stride;
    params.out = static_cast<__nv_bfloat16*>(t.out.data()) + first * params.stride;
    params.scales = sums + int64_t(params.rows) * shape.heads * splits * shape.head_dim;
    sm90::launch_singles(int(shape.head_dim), params, stream);
  }
}

}  // namespace tandem::gpu
