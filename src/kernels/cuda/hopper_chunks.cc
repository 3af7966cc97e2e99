#include "kernels/cuda/hopper_chunks.h"

#include <algorithm>
#include <cmath>

#include "core/cuda/architecture.h"
#include "core/cuda/share.h"
#include "core/system/env.h"
#include "gemm/cuda/tensor_map.h"
#include "kernels/cuda/sm90/attention_kernels.h"
#include "kernels/cuda/sm90/chunk_kernels.h"

namespace tandem::gpu {

static_assert(sm90::kChunkPage == kPageTokens);

bool has_hopper_pages(int64_t head_dim) {
  return (head_dim == 64 || head_dim == 128) && !env().gpu_portable &&
         architecture_of(this_share()->device()) == kHopper;
}

void attend_hopper_chunks(cudaStream_t stream, const PagedShape& shape, int64_t window,
                          const PagedRows& rows, const PagedTensors& t, int* ticket) {
  const int heads = sm90::heads_of_tile(int(shape.heads / shape.kv_heads));
  const int64_t num_pages = t.keys.dim(0), width = shape.kv_heads * shape.head_dim;
  const auto map_pages = [&](const Tensor& tensor) {
    return map_rows(tensor.data(), DType::bf16, num_pages, kPageTokens, width, width,
                    int(kPageTokens));
  };
  sm90::ChunkParams params{
      .q = map_heads(t.q.data(), DType::bf16, t.q.dim(0), shape.heads, shape.head_dim,
                     t.q.stride(0), sm90::kChunkTile / heads, heads),
      .keys = map_pages(t.keys),
      .values = map_pages(t.values),
      .sequences = rows.sequences.as<int32_t>(),
      .positions = rows.positions.as<int32_t>(),
      .pages = rows.pages.as<int32_t>(),
      .pages_of_line = rows.pages.stride(0),
      .out = static_cast<__nv_bfloat16*>(t.out.data()),
      .stride = t.out.stride(0),
      .ticket = ticket,
      .num_pages = int(num_pages),
      .heads = int(shape.heads),
      .kv_heads = int(shape.kv_heads),
      .heads_of_tile = heads,
      .window = int(window),
      .scale_log2 = float(sm90::kLog2E / std::sqrt(double(shape.head_dim))),
      .sms = this_share()->sms(),
      .num_chunks = 0,
      .chunks = {}};
  for (size_t first = 0; first < rows.chunks.size(); first += sm90::kMaxChunks) {
    params.num_chunks = int(std::min(rows.chunks.size() - first, size_t(sm90::kMaxChunks)));
    std::transform(rows.chunks.begin() + std::ptrdiff_t(first),
                   rows.chunks.begin() + std::ptrdiff_t(first) + params.num_chunks, params.chunks,
                   [](const PagedChunk& chunk) {
                     return sm90::Chunk{int(chunk.first), int(chunk.rows)};
                   });
    sm90::launch_chunks(int(shape.head_dim), params, stream);
  }
}

}  // namespace tandem::gpu
