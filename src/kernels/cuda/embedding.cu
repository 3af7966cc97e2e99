#include "core/cuda/load_module.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"

namespace tandem::gpu {
namespace {

template <typename T, int kWidth>
struct Lookup {
  const int32_t* tokens;
  int64_t begin, table_rows;
  Rows<T, kWidth> table, out;

  using Loaded = Vector<T, kWidth>;
  __device__ Loaded load(int64_t row, int64_t i) const {
    const int64_t table_row = tokens[row] - begin;
    if (table_row >= 0 && table_row < table_rows) return table.load(table_row, i);
    Loaded zero;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) zero.at[e] = from_float<T>(0);
    return zero;
  }
  __device__ void store(int64_t row, int64_t i, const Loaded& in) const {
    out.store(row, i, in);
  }
};

constexpr int kScanThreads = 256;
constexpr int kScanRounds = 4;  // tokens of a thread in one scan
constexpr int kScan = kScanThreads * kScanRounds;

// Indices, in order, of those of the kScan tokens from `first` on that name table row `row`.
// Returns their number to every thread of the block.
__device__ int find_tokens(const int32_t* tokens, int64_t first, int64_t num_tokens, int64_t row,
                           int64_t begin, int* found) {
  constexpr int kWarps = kScanThreads / 32;
  __shared__ unsigned matches[kScanRounds * kWarps];  // bit b of word w: token 32 w + b
  const int warp = int(threadIdx.x / 32);
  const unsigned lane = threadIdx.x % 32;
  unsigned own[kScanRounds];
  bool any = false;
#pragma unroll
  for (int k = 0; k < kScanRounds; ++k) {
    const int64_t i = first + k * kScanThreads + threadIdx.x;
    const bool match = i < num_tokens && tokens[i] - begin == row;
    own[k] = __ballot_sync(~0u, match);
    any = any || match;
    if (lane == 0) matches[k * kWarps + warp] = own[k];
  }
  if (!__syncthreads_or(any)) return 0;
  int total = 0, before[kScanRounds] = {};
  for (int w = 0; w < kScanRounds * kWarps; ++w) {
    const int count = __popc(matches[w]);
#pragma unroll
    for (int k = 0; k < kScanRounds; ++k) before[k] += w < k * kWarps + warp ? count : 0;
    total += count;
  }
#pragma unroll
  for (int k = 0; k < kScanRounds; ++k) {
    if (!(own[k] >> lane & 1u)) continue;
    found[before[k] + __popc(own[k] & ((1u << lane) - 1))] = k * kScanThreads + int(threadIdx.x);
  }
  __syncthreads();
  return total;
}

// One block per row of dtable and range of its columns.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kScanThreads)
    embedding_backward_kernel(const int32_t* tokens, int64_t num_tokens, int64_t begin,
                              Rows<T, kWidth> dout, Rows<float, kWidth> dtable, int64_t vectors) {
  __shared__ int found[kScan];
  const int64_t row = blockIdx.x;
  const int64_t first_vector = int64_t(blockIdx.y) * kKeptVectors * kScanThreads + threadIdx.x;
  const auto for_each_vector = [&](const auto& body) {
#pragma unroll
    for (int k = 0; k < kKeptVectors; ++k) {
      const int64_t i = first_vector + k * kScanThreads;
      if (i < vectors) body(k, i);
    }
  };
  Vector<float, kWidth> sum[kKeptVectors];
  bool loaded = false;
  for (int64_t first = 0; first < num_tokens; first += kScan) {
    const int count = find_tokens(tokens, first, num_tokens, row, begin, found);
    if (count > 0 && !loaded) {
      for_each_vector([&](int k, int64_t i) { sum[k] = dtable.load(row, i); });
      loaded = true;
    }
#pragma unroll 2
    for (int m = 0; m < count; ++m) {
      Vector<T, kWidth> added[kKeptVectors];
      for_each_vector([&](int k, int64_t i) { added[k] = dout.load(first + found[m], i); });
      for_each_vector([&](int k, int64_t) {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sum[k].at[e] += to_float(added[k].at[e]);
      });
    }
    __syncthreads();  // `found` has been read
  }
  if (!loaded) return;
  for_each_vector([&](int k, int64_t i) { dtable.store(row, i, sum[k]); });
}

}  // namespace

void embedding_forward(cudaStream_t stream, const Tensor& tokens, const Tensor& table,
                       int64_t begin, const Tensor& out) {
  require_dtype("embedding_forward: tokens", tokens, DType::i32);
  with_element("embedding_forward: out", out, [&]<typename T>(T) {
    require_dtype("embedding_forward: table", table, out.dtype());
    with_width<16 / int(sizeof(T))>({&table, &out}, [&](auto width) {
      using AnyRows = Rows<T, width()>;
      launch_map("embedding_forward",
                 Lookup<T, width()>{tokens.as<int32_t>(), begin, table.dim(0), AnyRows(table),
                                    AnyRows(out)},
                 tokens.dim(0), table.dim(1) / width(), stream);
    });
  });
}

void embedding_backward(cudaStream_t stream, const Tensor& tokens, const Tensor& dout,
                        int64_t begin, const Tensor& dtable) {
  require_dtype("embedding_backward: tokens", tokens, DType::i32);
  require_dtype("embedding_backward: dtable", dtable, DType::f32);
  with_element("embedding_backward: dout", dout, [&]<typename T>(T) {
    if (tokens.elements() == 0 || dtable.elements() == 0) return;
    with_width<4>({&dout, &dtable}, [&](auto width) {
      constexpr int kWidth = width();
      const int64_t vectors = dtable.dim(1) / kWidth;
      const dim3 grid(unsigned(dtable.dim(0)),
                      unsigned((vectors - 1) / (kKeptVectors * kScanThreads) + 1));
      embedding_backward_kernel<<<grid, kScanThreads, 0, stream>>>(
          tokens.as<int32_t>(), tokens.dim(0), begin, Rows<T, kWidth>(dout),
          Rows<float, kWidth>(dtable), vectors);
      check_launch("embedding_backward_kernel");
    });
  });
}

}  // namespace tandem::gpu
