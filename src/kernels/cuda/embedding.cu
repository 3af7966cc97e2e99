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

// Backward pass: tokens are sorted by table row, so that the positions of a row are one run, in
// order.

constexpr int kScanThreads = 256;
constexpr int kScanWarps = kScanThreads / 32;
constexpr int kScanRounds = 4;  // tokens of a thread in one scan
constexpr int kScan = kScanThreads * kScanRounds;

// Sum of the values of the warp's lanes up to this one.
__device__ int sum_up_to_lane(int value) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(~0u, value, offset);
    if (int(threadIdx.x % 32) >= offset) value += other;
  }
  return value;
}

// Indices, in order, of those of the kScan tokens from `first` on for which is_wanted(token index).
// Returns their number to every thread of the block.
template <typename IsWanted>
__device__ int find_tokens(int first, int num_tokens, const IsWanted& is_wanted, int* found) {
  static_assert(kScan == 32 * 32);
  __shared__ unsigned matches[32];  // bit b of word w: token 32 w + b
  const int warp = int(threadIdx.x / 32);
  const unsigned lane = threadIdx.x % 32;
  bool is_match[kScanRounds], any = false;
#pragma unroll
  for (int k = 0; k < kScanRounds; ++k) {
    const int i = first + k * kScanThreads + int(threadIdx.x);
    is_match[k] = i < num_tokens && is_wanted(i);
  }
  unsigned ballots[kScanRounds];
#pragma unroll
  for (int k = 0; k < kScanRounds; ++k) {
    ballots[k] = __ballot_sync(~0u, is_match[k]);
    any = any || is_match[k];
    if (lane == 0) matches[k * kScanWarps + warp] = ballots[k];
  }
  if (!__syncthreads_or(any)) return 0;
  const int in_word = __popc(matches[lane]), up_to_word = sum_up_to_lane(in_word);
#pragma unroll
  for (int k = 0; k < kScanRounds; ++k) {
    const int before = __shfl_sync(~0u, up_to_word - in_word, k * kScanWarps + warp);
    if (!(ballots[k] >> lane & 1u)) continue;
    found[before + __popc(ballots[k] & ((1u << lane) - 1))] = k * kScanThreads + int(threadIdx.x);
  }
  __syncthreads();
  return __shfl_sync(~0u, up_to_word, 31);
}

/// Local table rows of tokens; kOther for those of other ranks.
struct TokenRows {
  const int32_t* tokens;
  int64_t begin, table_rows;

  static constexpr int kOther = -1;
  __device__ int operator()(int i) const {
    const int64_t row = tokens[i] - begin;
    return row >= 0 && row < table_rows ? int(row) : kOther;
  }
};

constexpr int kRowsPerBlock = 2 * kScanThreads;

// Writes the rows of all tokens that have one, grouped by row, and their positions, in order within
// a row; then kOther. Every gridDim.x-th table row is a block's, at most kRowsPerBlock: it scans
// all tokens, once to count those of its rows and of lower blocks, once to write its own. gridDim.x
// is 2^log_blocks.
__global__ void __launch_bounds__(kScanThreads)
    sort_tokens_kernel(TokenRows to_row, int num_tokens, int log_blocks, int32_t* rows,
                       int32_t* positions) {
  __shared__ int next[kRowsPerBlock];  // counts of the block's rows, then index of the next token
  __shared__ int warp_lower[kScanWarps], warp_counts[kScanWarps];
  __shared__ int found[kScan];
  const int thread = int(threadIdx.x), warp = thread / 32;
  const unsigned lane = threadIdx.x % 32;
  const int block = int(blockIdx.x), block_mask = int(gridDim.x) - 1;
  next[2 * thread] = next[2 * thread + 1] = 0;
  __syncthreads();
  int lower = 0;
  for (int first = thread; first < num_tokens; first += 8 * kScanThreads) {
    int row[8];  // loaded together
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int i = first + k * kScanThreads;
      row[k] = i < num_tokens ? to_row(i) : TokenRows::kOther;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (row[k] == TokenRows::kOther) continue;
      const int owner = row[k] & block_mask;
      lower += owner < block;
      if (owner == block) atomicAdd(&next[row[k] >> log_blocks], 1);
    }
  }
  __syncthreads();

  // Prefix sums over the block's rows, two a thread, after the tokens of lower blocks.
  const int first_count = next[2 * thread], count = first_count + next[2 * thread + 1];
  const int up_to = sum_up_to_lane(count);
  lower = __reduce_add_sync(~0u, lower);
  if (lane == 31) warp_lower[warp] = lower, warp_counts[warp] = up_to;
  __syncthreads();
  int begin = up_to - count, end = 0;
#pragma unroll
  for (int w = 0; w < kScanWarps; ++w) {
    begin += warp_lower[w] + (w < warp ? warp_counts[w] : 0);
    end += warp_lower[w] + warp_counts[w];
  }
  next[2 * thread] = begin;
  next[2 * thread + 1] = begin + first_count;

  for (int first = 0; first < num_tokens; first += kScan) {
    const auto is_in_block = [&](int i) {
      const int row = to_row(i);
      return row != TokenRows::kOther && (row & block_mask) == block;
    };
    __syncthreads();  // `next` has been written, `found` has been read
    const int num_found = find_tokens(first, num_tokens, is_in_block, found);
    if (warp != 0) continue;
    for (int m = int(lane); m - int(lane) < num_found; m += 32) {
      const int position = m < num_found ? first + found[m] : -1;
      const int row = position >= 0 ? to_row(position) : TokenRows::kOther;
      const unsigned same = __match_any_sync(~0u, row);
      const int before = __popc(same & ((1u << lane) - 1));
      const int at = position >= 0 ? next[row >> log_blocks] + before : 0;
      __syncwarp();
      if (position >= 0) {
        if (before + 1 == __popc(same)) next[row >> log_blocks] = at + 1;
        rows[at] = row;
        positions[at] = position;
      }
      __syncwarp();
    }
  }
  if (block != block_mask) return;
  for (int i = end + thread; i < num_tokens; i += kScanThreads) rows[i] = TokenRows::kOther;
}

/// Sorted tokens.
struct Runs {
  const int32_t* rows;
  const int32_t* positions;
  int count;

  static constexpr int kLong = 64;  // tokens, at least, of a long run
  __device__ int row(int i) const { return i >= 0 && i < count ? rows[i] : TokenRows::kOther; }
  __device__ int position(int i) const { return i < count ? positions[i] : 0; }
};

// First token of the only long run that starts in the `unit`-th kLong tokens, or -1.
__device__ int find_long_run(const Runs& runs, int unit) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = unit * Runs::kLong + half * 32, i = first + int(threadIdx.x % 32);
    const int row = runs.row(i), before = runs.row(i - 1), far = runs.row(i + Runs::kLong - 1);
    const bool is_start = row != TokenRows::kOther && row != before && row == far;
    const unsigned found = __ballot_sync(~0u, is_start);
    if (found) return first + __ffs(int(found)) - 1;
  }
  return -1;
}

constexpr int kRunThreads = 128;
constexpr int kRunWarps = kRunThreads / 32;

// Each warp adds the rows of one run, in order, to 32 vectors of its table row. First `long_units`
// units for long runs, then one per token, for the shorter run that starts there. gridDim.x:
// `blocks_per_row` times the blocks of all units.
template <typename T, typename D, int kWidth>
__global__ void __launch_bounds__(kRunThreads, 7)
    embedding_backward_kernel(Runs runs, Rows<T, kWidth> dout, Rows<D, kWidth> dtable, int vectors,
                              int long_units, unsigned blocks_per_row) {
  using Packed = PackedVector<T, kWidth>;
  constexpr int kMany = sizeof(Packed) == 16 ? 8 : 16, kFew = 4;  // rows whose loads are in flight
  const int unit = int(blockIdx.x / blocks_per_row * kRunWarps + threadIdx.x / 32);
  const bool is_long = unit < long_units;
  int first = is_long ? find_long_run(runs, unit) : unit - long_units;
  if (first < 0) return;
  const int lane = int(threadIdx.x % 32), vector = int(blockIdx.x % blocks_per_row) * 32 + lane;
  const int i = min(vector, vectors - 1);
  int lane_row = runs.row(first + lane), position = runs.position(first + lane);
  const int before = runs.row(first - 1), far = runs.row(first + Runs::kLong - 1);
  const int row = __shfl_sync(~0u, lane_row, 0);
  if (row == TokenRows::kOther || row == before || (row == far) != is_long) return;
  const Vector<D, kWidth> before_run = dtable.load(row, i);
  Vector<float, kWidth> sum;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) sum.at[e] = to_float(before_run.at[e]);
  for (int count = 32; count == 32;) {
    count = __popc(__ballot_sync(~0u, lane_row == row));
    int next_position = 0;
    if (count == 32) {
      first += 32;
      lane_row = runs.row(first + lane);
      next_position = runs.position(first + lane);
    }
    // Adds the first num_rows of the rows of positions [at, at + kCount).
    const auto add = [&]<int kCount>(int at, int num_rows) {
      Packed added[kCount];
#pragma unroll
      for (int m = 0; m < kCount; ++m) {
        const int source = __shfl_sync(~0u, position, at + m);
        if (m >= num_rows) continue;
        added[m] = dout.load_packed(source, i);
      }
#pragma unroll
      for (int m = 0; m < kCount; ++m) {
        if (m >= num_rows) continue;
        const Vector<T, kWidth> values = added[m].unpack();
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sum.at[e] += to_float(values.at[e]);
      }
    };
    int at = 0;
#pragma unroll 1
    for (; at + kMany <= count; at += kMany) add.template operator()<kMany>(at, kMany);
#pragma unroll 1
    for (; at < count; at += kFew) add.template operator()<kFew>(at, count - at);
    position = next_position;
  }
  if (vector >= vectors) return;
  Vector<D, kWidth> result;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) result.at[e] = from_float<D>(sum.at[e]);
  dtable.store(row, i, result);
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
                        int64_t begin, const Tensor& dtable, const Tensor& order) {
  require_dtype("embedding_backward: tokens", tokens, DType::i32);
  const auto add_runs = [&]<typename T, typename D>(T, D) {
    if (tokens.elements() == 0 || dtable.elements() == 0) return;
    const int64_t num_tokens = tokens.dim(0);
    require_dtype("embedding_backward: order", order, DType::i32);
    require_shape("embedding_backward: order", order, {2, num_tokens});
    const Tensor rows = order.rows(0, 1), positions = order.rows(1, 1);
    const TokenRows to_row{tokens.as<int32_t>(), begin, dtable.dim(0)};
    int log_blocks = 0;
    while ((int64_t(kRowsPerBlock) << log_blocks) < dtable.dim(0)) ++log_blocks;
    sort_tokens_kernel<<<1u << log_blocks, kScanThreads, 0, stream>>>(
        to_row, int(num_tokens), log_blocks, rows.as<int32_t>(), positions.as<int32_t>());
    check_launch("sort_tokens_kernel");
    const Runs runs{rows.as<int32_t>(), positions.as<int32_t>(), int(num_tokens)};
    const int64_t long_units = (num_tokens - 1) / Runs::kLong + 1;
    const int64_t unit_blocks = (long_units + num_tokens - 1) / kRunWarps + 1;
    with_width<4>({&dout, &dtable}, [&](auto width) {
      constexpr int kWidth = width();
      const int64_t vectors = dtable.dim(1) / kWidth, blocks_per_row = (vectors - 1) / 32 + 1;
      embedding_backward_kernel<<<unsigned(unit_blocks * blocks_per_row), kRunThreads, 0, stream>>>(
          runs, Rows<T, kWidth>(dout), Rows<D, kWidth>(dtable), int(vectors), int(long_units),
          unsigned(blocks_per_row));
      check_launch("embedding_backward_kernel");
    });
  };
  with_element("embedding_backward: dout", dout, [&]<typename T>(T t) {
    with_element("embedding_backward: dtable", dtable, [&]<typename D>(D d) { add_runs(t, d); });
  });
}

}  // namespace tandem::gpu
