// Attention with f32 arithmetic on CUDA cores. A block owns a tile of queries (forward, dq) or of
// keys (dk, dv) and visits the tiles of the other side in a fixed order; scores exist only for a
// pair of tiles, in registers and shared memory. Kernels with kMasked visit only tiles of which
// some query's window and document contain a key.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <string>
#include <type_traits>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/attention_tiles.cuh"
#include "kernels/cuda/kernels.h"

namespace tandem::gpu {
namespace {

using namespace attention;

constexpr int kMaxHead = 128;
constexpr int kBlocksPerSm = 2;

/// Shared memory of each kernel, in floats.
template <int kHead>
constexpr int kForwardFloats = 2 * kTile* kStride<kHead> + kTile*(kTile + kPad);
template <int kHead>
constexpr int kQueriesFloats = (2 * kTile + kStep) * kStride<kHead> + kTile*(kStep + kPad) + kTile;
template <int kHead>
constexpr int kKeysFloats = (2 * kTile + kStep) * kStride<kHead> + kStep*(kTile + kPad) + kStep;

/// Dynamic shared memory, zeroed: loads leave the columns beyond head_dim as they are.
__device__ float* cleared_memory(int floats) {
  extern __shared__ float4 attention_memory[];
  auto* const memory = reinterpret_cast<float*>(attention_memory);
  for (int i = int(threadIdx.x); i < floats; i += kThreads) memory[i] = 0;
  __syncthreads();
  return memory;
}

/// Tile of queries or keys, head and sequence of a block. Blocks with an equal tile are next to
/// each other.
struct Work {
  __device__ Work(int sequences, int heads)
      : tile(int(blockIdx.x) / (sequences * heads)),
        sequence(int(blockIdx.x) % (sequences * heads) / heads),
        head(int(blockIdx.x) % heads) {}
  int tile, sequence, head;
};

template <typename T>
__device__ Slice make_slice(const Params<T>& p, int sequence, int head, int first, int rows) {
  return {int64_t(sequence) * p.seq + first, int64_t(head) * 2 * p.half, first,
          min(rows, p.seq - first)};
}

template <typename T>
__device__ float* head_log_sums(const Params<T>& p, int sequence, int head) {
  return p.log_sums + (int64_t(sequence) * p.heads + head) * p.seq;
}

__device__ int num_tiles(int seq) {
  return (seq + kTile - 1) / kTile;
}

/// First key that a query reads; does not decrease from query to query.
template <bool kMasked, typename T>
__device__ int first_key(const Params<T>& p, int sequence, int query) {
  if (!kMasked) return 0;
  const int first = p.window > 0 ? max(0, query - p.window + 1) : 0;
  return p.document_starts && query < p.seq
             ? max(first, p.document_starts[int64_t(sequence) * p.seq + query])
             : first;
}

/// First key of queries from `query` on, rounded down to a multiple of kKeys.
template <bool kMasked, int kKeys, typename T>
__device__ int begin_of_keys(const Params<T>& p, int sequence, int query) {
  return first_key<kMasked>(p, sequence, query) / kKeys * kKeys;
}

/// End of the queries that read keys before `end`.
template <bool kMasked, typename T>
__device__ int end_of_queries(const Params<T>& p, int sequence, int end) {
  if (!kMasked || end >= p.seq) return p.seq;
  int first = end, last = p.seq;  // the end is between these
  while (first < last) {
    const int query = (first + last) / 2;
    if (first_key<kMasked>(p, sequence, query) < end) {
      first = query + 1;
    } else {
      last = query;
    }
  }
  return first;
}

template <int kHead, typename T, bool kMasked>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) forward_kernel(Params<T> p) {
  float* const q = cleared_memory(kForwardFloats<kHead>);
  float* const kv = q + kTile * kStride<kHead>;  // keys, then values
  float* const weights = kv + kTile * kStride<kHead>;
  const Work work(p.sequences, p.heads);
  const int tile = num_tiles(p.seq) - 1 - work.tile;  // the longest first
  const int kv_head = work.head / (p.heads / p.kv_heads), first = tile * kTile;
  const Slice queries = make_slice(p, work.sequence, work.head, first, kTile);
  load_rotated<kHead, kTile>(p, p.q, queries, p.scale, q);

  Accumulators<kHead> sums{};
  float largest[kOwned], total[kOwned];
  // Finite even in a tile before the keys that a query reads.
  int from[kOwned];  // first key of a query
  for (int i = 0; i < kOwned; ++i) {
    largest[i] = kMasked ? -FLT_MAX : -INFINITY, total[i] = 0;
    from[i] = first_key<kMasked>(p, work.sequence, first + row_a<kOwned>(i));
  }
  for (int key = begin_of_keys<kMasked, kTile>(p, work.sequence, first); key <= first;
       key += kTile) {
    const Slice keys = make_slice(p, work.sequence, kv_head, key, kTile);
    __syncthreads();  // the previous values have been read
    load_rotated<kHead, kTile>(p, p.k, keys, 1.0f, kv);
    __syncthreads();
    float scores[kOwned][kTile / kLanes];
    multiply_rows<kHead>(q, kv, scores);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      float top = largest[i], sum = 0;
#pragma unroll
      for (int j = 0; j < kTile / kLanes; ++j) {
        const int read = key + row_b(j);
        if (read > first + row_a<kOwned>(i) || read < from[i]) scores[i][j] = -INFINITY;
        top = fmaxf(top, scores[i][j]);
      }
      top = row_max(top);  // finite: without a mask every query reads key 0, in the first tile
#pragma unroll
      for (int j = 0; j < kTile / kLanes; ++j) {
        scores[i][j] = expf(scores[i][j] - top);
        sum += scores[i][j];
      }
      const float factor = expf(largest[i] - top);
      total[i] = factor * total[i] + row_sum(sum);
      largest[i] = top;
#pragma unroll
      for (int c = 0; c < Columns<kHead>::kCount; ++c) sums[i][c] *= factor;
    }
    write_scores(scores, weights);
    __syncthreads();  // the keys have been read
    load_rows<kHead, kTile>(p, p.v, keys, kv);
    __syncthreads();
    add_products<kHead, kTile>(weights, kv, sums);
  }

  float* const log_sums = head_log_sums(p, work.sequence, work.head) + first;
  float inverse[kOwned];
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    inverse[i] = 1 / total[i];
    if (thread_lane() == 0 && row_a<kOwned>(i) < queries.count) {
      log_sums[row_a<kOwned>(i)] = largest[i] + logf(total[i]);
    }
  }
  write_tile<kHead>(sums, inverse, q);
  __syncthreads();
  store_rows<kHead>(p, q, queries, p.out);
}

/// Softmax of a thread's scores from the log sums, 0 for keys that a query does not read and beyond
/// the sequence, and the gradient of the scores from that of the weights.
template <bool kMasked, typename T, int kA, int kB>
__device__ void softmax_backward(const Params<T>& p, const Work& work, int head, int query_tile,
                                 int key_tile, const float* deltas, float (&scores)[kA][kB],
                                 float (&gradients)[kA][kB]) {
  const float* const log_sums = head_log_sums(p, work.sequence, head);
#pragma unroll
  for (int i = 0; i < kA; ++i) {
    const int query = query_tile + row_a<kA>(i);
    const int from = first_key<kMasked>(p, work.sequence, query);
    const float log_sum = query < p.seq ? log_sums[query] : 0, delta = deltas[row_a<kA>(i)];
#pragma unroll
    for (int j = 0; j < kB; ++j) {
      const int key = key_tile + row_b(j);
      const bool is_read = key <= query && key >= from && query < p.seq;
      scores[i][j] = is_read ? expf(scores[i][j] - log_sum) : 0;
      gradients[i][j] = scores[i][j] * (gradients[i][j] - delta);
    }
  }
}

template <int kHead, typename T, bool kMasked>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) backward_queries_kernel(Params<T> p) {
  float* const q = cleared_memory(kQueriesFloats<kHead>);
  float* const dout = q + kTile * kStride<kHead>;
  float* const kv = dout + kTile * kStride<kHead>;  // values, then keys
  float* const dscores = kv + kStep * kStride<kHead>;
  float* const deltas = dscores + kTile * (kStep + kPad);
  const Work work(p.sequences, p.heads);
  const int tile = num_tiles(p.seq) - 1 - work.tile;  // the longest first
  const int kv_head = work.head / (p.heads / p.kv_heads), first = tile * kTile;
  const Slice queries = make_slice(p, work.sequence, work.head, first, kTile);
  load_rotated<kHead, kTile>(p, p.q, queries, p.scale, q);
  load_dout<kHead, kTile>(p, queries, dout, deltas);

  Accumulators<kHead> sums{};
  for (int key = begin_of_keys<kMasked, kStep>(p, work.sequence, first);
       key < first + queries.count; key += kStep) {
    const Slice keys = make_slice(p, work.sequence, kv_head, key, kStep);
    __syncthreads();  // the previous keys have been read
    load_rows<kHead, kStep>(p, p.v, keys, kv);
    __syncthreads();
    float scores[kOwned][kStep / kLanes], gradients[kOwned][kStep / kLanes];
    multiply_rows<kHead>(dout, kv, gradients);
    __syncthreads();  // the values have been read
    load_rotated<kHead, kStep>(p, p.k, keys, 1.0f, kv);
    __syncthreads();
    multiply_rows<kHead>(q, kv, scores);
    softmax_backward<kMasked>(p, work, work.head, first, key, deltas, scores, gradients);
    write_scores(gradients, dscores);
    __syncthreads();
    add_products<kHead, kStep>(dscores, kv, sums);
  }
  write_tile<kHead>(sums, {1, 1, 1, 1}, q);
  __syncthreads();
  store_rotated_back<kHead>(p, q, queries, p.scale, p.dq);
}

template <int kHead, typename T, bool kMasked>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) backward_keys_kernel(Params<T> p) {
  float* const k = cleared_memory(kKeysFloats<kHead>);
  float* const v = k + kTile * kStride<kHead>;
  float* const rows = v + kTile * kStride<kHead>;        // queries, dout, queries again
  float* const weights = rows + kStep * kStride<kHead>;  // then gradients of the scores
  float* const deltas = weights + kStep * (kTile + kPad);
  const Work work(p.sequences, p.kv_heads);
  const int first = work.tile * kTile, group = p.heads / p.kv_heads;
  const Slice keys = make_slice(p, work.sequence, work.head, first, kTile);
  load_rotated<kHead, kTile>(p, p.k, keys, 1.0f, k);
  load_rows<kHead, kTile>(p, p.v, keys, v);

  const int end = end_of_queries<kMasked>(p, work.sequence, first + kTile);
  Accumulators<kHead> dk{}, dv{};
  for (int head = work.head * group; head < (work.head + 1) * group; ++head) {
    for (int query = first; query < end; query += kStep) {
      const Slice queries = make_slice(p, work.sequence, head, query, kStep);
      __syncthreads();  // the previous queries have been read
      load_rotated<kHead, kStep>(p, p.q, queries, p.scale, rows);
      __syncthreads();
      float scores[kStep / kLanes][kTile / kLanes], gradients[kStep / kLanes][kTile / kLanes];
      multiply_rows<kHead>(rows, k, scores);
      __syncthreads();  // the queries have been read
      load_dout<kHead, kStep>(p, queries, rows, deltas);
      __syncthreads();
      multiply_rows<kHead>(rows, v, gradients);
      softmax_backward<kMasked>(p, work, head, query, first, deltas, scores, gradients);
      write_scores(scores, weights);
      __syncthreads();
      add_transposed_products<kHead>(weights, rows, dv);
      __syncthreads();  // the weights and dout have been read
      write_scores(gradients, weights);
      load_rotated<kHead, kStep>(p, p.q, queries, p.scale, rows);
      __syncthreads();
      add_transposed_products<kHead>(weights, rows, dk);
    }
  }
  write_tile<kHead>(dk, {1, 1, 1, 1}, k);
  write_tile<kHead>(dv, {1, 1, 1, 1}, v);
  __syncthreads();
  store_rotated_back<kHead>(p, k, keys, 1.0f, p.dk);
  store_rows<kHead>(p, v, keys, p.dv);
}

/// One block per tile of kTile positions, for each of `heads` heads of each sequence.
template <typename T>
void launch(void (*kernel)(Params<T>), const Params<T>& params, int heads, int floats,
            const char* name, cudaStream_t stream) {
  const int bytes = floats * int(sizeof(float));
  // Every time: the attribute is of the kernel on the current device.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), name);
  const int64_t tiles = (params.seq + kTile - 1) / kTile;
  kernel<<<unsigned(tiles * params.sequences * heads), kThreads, size_t(bytes), stream>>>(params);
  check_launch(name);
}

/// Calls body(std::integral_constant<int, kHead>) with the smallest compiled head size.
template <typename Body>
void with_head(int64_t head_dim, const Body& body) {
  if (head_dim <= 32) return body(std::integral_constant<int, 32>{});
  if (head_dim <= 64) return body(std::integral_constant<int, 64>{});
  body(std::integral_constant<int, kMaxHead>{});
}

/// Calls body(std::bool_constant<kMasked>).
template <typename T, typename Body>
void with_mask(const Params<T>& params, const Body& body) {
  if (params.window > 0 || params.document_starts) return body(std::true_type{});
  body(std::false_type{});
}

/// Calls body(T{}).
template <typename Body>
void with_type(DType dtype, const char* name, const Body& body) {
  if (dtype == DType::f32) return body(float{});
  if (dtype == DType::bf16) return body(__nv_bfloat16{});
  throw InvalidArgument(std::string(name) + ": dtype " + std::string(name_of(dtype)) +
                        ": expected f32 or bf16");
}

template <typename T>
Rows<T> make_rows(const Tensor& tensor) {
  return {tensor.as<T>(), tensor.stride(0)};
}

template <typename T>
Params<T> make_params(const AttentionShape& shape, const RopeTable& rope, const Tensor& q,
                      const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& log_sums,
                      const AttentionMask& mask) {
  Params<T> p{};
  p.sequences = int(shape.batch), p.seq = int(shape.seq), p.heads = int(shape.heads);
  p.kv_heads = int(shape.kv_heads), p.half = int(shape.head_dim / 2);
  p.scale = float(1 / std::sqrt(double(shape.head_dim)));
  p.cos = rope.cos(0), p.sin = rope.sin(0);
  p.q = make_rows<const T>(q), p.k = make_rows<const T>(k), p.v = make_rows<const T>(v);
  p.out = make_rows<T>(out), p.log_sums = log_sums.as<float>();
  p.window = int(effective_window(shape, mask.window));
  if (mask.document_starts.dims() > 0) p.document_starts = mask.document_starts.as<int32_t>();
  return p;
}

bool empty(const AttentionShape& shape) {
  return shape.batch * shape.seq * shape.heads == 0;
}

}  // namespace

void check_attention(const AttentionShape& shape) {
  const std::string name = "attention: head_dim " + std::to_string(shape.head_dim);
  if (shape.head_dim < 2 || shape.head_dim > kMaxHead || shape.head_dim % 2 != 0) {
    throw Unsupported(name + ": GPUs support even sizes from 2 to " + std::to_string(kMaxHead));
  }
  int device = 0, available = 0;
  check(cudaGetDevice(&device), "attention");
  check(cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "attention");
  with_head(shape.head_dim, [&](auto head) {
    constexpr int kHead = decltype(head)::value;
    constexpr int kBytes =
        int(sizeof(float)) *
        std::max({kForwardFloats<kHead>, kQueriesFloats<kHead>, kKeysFloats<kHead>});
    static_assert(kBytes <= 99 * 1024, "shared memory of a block on sm_86");
    if (kBytes <= available) return;
    throw Unsupported(name + ": needs " + std::to_string(kBytes) +
                      " bytes of shared memory per block, this GPU has " +
                      std::to_string(available));
  });
}

void attention_forward(CUstream_st* stream, const AttentionShape& shape, const RopeTable& rope,
                       const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                       const Tensor& log_sums, const AttentionMask& mask) {
  if (empty(shape)) return;
  with_type(q.dtype(), "attention", [&]<typename T>(T) {
    const auto params = make_params<T>(shape, rope, q, k, v, out, log_sums, mask);
    with_head(shape.head_dim, [&](auto head) {
      with_mask(params, [&](auto is_masked) {
        constexpr int kHead = decltype(head)::value;
        launch(forward_kernel<kHead, T, decltype(is_masked)::value>, params, params.heads,
               kForwardFloats<kHead>, "attention", stream);
      });
    });
  });
}

void attention_backward(CUstream_st* stream, const AttentionShape& shape, const RopeTable& rope,
                        const AttentionGradients& t, const AttentionMask& mask) {
  if (empty(shape)) return;
  constexpr const char* kName = "attention_backward";
  with_type(t.q.dtype(), kName, [&]<typename T>(T) {
    auto params = make_params<T>(shape, rope, t.q, t.k, t.v, t.out, t.log_sums, mask);
    params.dout = make_rows<const T>(t.dout);
    params.dq = make_rows<T>(t.dq), params.dk = make_rows<T>(t.dk), params.dv = make_rows<T>(t.dv);
    with_head(shape.head_dim, [&](auto head) {
      with_mask(params, [&](auto is_masked) {
        constexpr int kHead = decltype(head)::value;
        constexpr bool kMasked = decltype(is_masked)::value;
        launch(backward_queries_kernel<kHead, T, kMasked>, params, params.heads,
               kQueriesFloats<kHead>, kName, stream);
        launch(backward_keys_kernel<kHead, T, kMasked>, params, params.kv_heads, kKeysFloats<kHead>,
               kName, stream);
      });
    });
  });
}

}  // namespace tandem::gpu
