// Sampling without sorting: weights are integers, so sums over tokens have one result in any order,
// and a token at a position of the sorted order is found digit by digit of its logit. A cluster of
// blocks shares a row.
#include <cooperative_groups.h>

#include <string>

#include "core/cuda/load_module.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"
#include "kernels/sample.h"

namespace tandem::gpu {
namespace {

namespace cg = cooperative_groups;

constexpr int kBlocksPerRow = 8;
constexpr int kSampleThreads = 1024;
constexpr int kDigits = 256;
constexpr double kUnit = double(1ull << 40);  // weight of the likeliest token

using Weight = unsigned long long;

/// Bits of a finite logit, increasing with it; -0 has those of 0, as they are equal.
__device__ uint32_t key_of(float logit) {
  const uint32_t bits = __float_as_uint(logit == 0 ? 0.0f : logit);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/// Shared by a block's functions.
struct SampleMemory {
  Weight digits[kDigits];  // of this block
  Weight sums[kDigits];    // of all blocks
  Weight tile[kSampleThreads / 32];
  Weight before, total;
  uint32_t digit;
  float top;
  double exponentials;
  int bad, token;
};

/// One row's tokens [begin, end) of this block, and sums over all of them.
class RowOfLogits {
 public:
  __device__ RowOfLogits(SampleMemory& memory, const float* logits, Weight* weights, int vocab)
      : cluster_(cg::this_cluster()),
        memory_(memory),
        logits_(logits),
        weights_(weights),
        begin_(int(int64_t(vocab) * int(cluster_.block_rank()) / kBlocksPerRow)),
        end_(int(int64_t(vocab) * int(cluster_.block_rank() + 1) / kBlocksPerRow)) {}

  /// Largest logit of the row. Sets bad() if one is not finite.
  __device__ float largest() {
    float top = -INFINITY;
    int bad = 0;
    for (int i = begin_ + int(threadIdx.x); i < end_; i += kSampleThreads) {
      bad |= !isfinite(logits_[i]);
      top = fmaxf(top, logits_[i]);
    }
    bad = __syncthreads_or(bad);
    const float of_block = combine_block(top, Larger{});
    if (threadIdx.x == 0) memory_.top = of_block, memory_.bad = bad;
    cluster_.sync();
    float result = -INFINITY;
    is_bad_ = false;
    for (int b = 0; b < kBlocksPerRow; ++b) {
      const SampleMemory& other = *cluster_.map_shared_rank(&memory_, b);
      result = fmaxf(result, other.top);
      is_bad_ |= other.bad != 0;
    }
    cluster_.sync();
    return result;
  }
  __device__ bool is_bad() const { return is_bad_; }

  /// Logarithm of the sum of the logits' exponentials relative to `top`.
  __device__ double log_sum(float top) {
    // Equal on every run: threads add their tokens in order, then lanes, warps and blocks.
    double sum = 0;
    for (int i = begin_ + int(threadIdx.x); i < end_; i += kSampleThreads) {
      sum += double(expf(logits_[i] - top));
    }
    __shared__ double warps[kSampleThreads / 32];
#pragma unroll
    for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      double of_block = 0;
      for (const double warp : warps) of_block += warp;
      memory_.exponentials = of_block;
    }
    cluster_.sync();
    double result = 0;
    for (int b = 0; b < kBlocksPerRow; ++b) {
      result += cluster_.map_shared_rank(&memory_, b)->exponentials;
    }
    cluster_.sync();
    return log(result);
  }

  /// Writes the tokens' weights. Returns their sum.
  __device__ Weight weigh(float top, double temperature) {
    Weight sum = 0;
    for (int i = begin_ + int(threadIdx.x); i < end_; i += kSampleThreads) {
      const Weight weight =
          Weight(llrint(exp((double(logits_[i]) - double(top)) / temperature) * kUnit));
      weights_[i] = weight;
      sum += weight;
    }
    return total(sum);
  }

  struct Found {
    uint32_t key;
    Weight before;  ///< sum of the tokens with larger logits
  };
  /// Logit at which the sum over tokens, in the order of decreasing logits, first reaches `goal`:
  /// of their weights, or of ones. The sum over all tokens must be at least `goal`, which is 1 or
  /// more.
  __device__ Found find_logit(Weight goal, bool ones) {
    uint32_t prefix = 0;
    Weight before = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
      for (int d = int(threadIdx.x); d < kDigits; d += kSampleThreads) memory_.digits[d] = 0;
      __syncthreads();
      // All lanes of a warp take part in every step.
      constexpr int kAtOnce = 4;
      for (int first = begin_; first < end_; first += kAtOnce * kSampleThreads) {
        uint32_t keys[kAtOnce];
        Weight values[kAtOnce];
        bool counts[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int i = first + j * kSampleThreads + int(threadIdx.x);
          keys[j] = i < end_ ? key_of(logits_[i]) : 0;
          counts[j] = i < end_ && (shift == 24 || keys[j] >> (shift + 8) == prefix);
          values[j] = counts[j] && !ones ? weights_[i] : 1;
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          add_to_digit(counts[j], keys[j] >> shift & 255, values[j]);
        }
      }
      cluster_.sync();
      for (int d = int(threadIdx.x); d < kDigits; d += kSampleThreads) {
        Weight sum = 0;
        for (int b = 0; b < kBlocksPerRow; ++b) {
          sum += cluster_.map_shared_rank(&memory_, b)->digits[d];
        }
        memory_.sums[d] = sum;
      }
      __syncthreads();
      if (threadIdx.x < 32) find_digit(before, goal);
      cluster_.sync();
      prefix = prefix << 8 | memory_.digit;
      before = memory_.before;
    }
    return {prefix, before};
  }

  /// Sum of the weights of the first `count` tokens in that order.
  __device__ Weight first_weights(Weight count) {
    const Found found = find_logit(count, true);
    Weight larger = 0, equal = 0;
    for (int i = begin_ + int(threadIdx.x); i < end_; i += kSampleThreads) {
      const uint32_t key = key_of(logits_[i]);
      if (key > found.key) larger += weights_[i];
      if (key == found.key) equal = weights_[i];
    }
    larger = total(larger);
    // All tokens with one logit have one weight.
    return larger + (count - found.before) * any(equal);
  }

  /// Sum of the weights of the fewest first tokens that reach `goal`.
  __device__ Weight reaching_weights(Weight goal) {
    const Found found = find_logit(goal, false);
    const Weight equal = weight_of(found.key);
    return found.before + (goal - found.before + equal - 1) / equal * equal;
  }

  /// Token at which the sum of weights first reaches `goal`, in the order of decreasing logits.
  __device__ int sorted_token(Weight goal) {
    const Found found = find_logit(goal, false);
    const Weight equal = weight_of(found.key);
    return token_of_sum((goal - found.before + equal - 1) / equal,
                        [&](int i) { return Weight(key_of(logits_[i]) == found.key); });
  }
  /// In the order of tokens.
  __device__ int indexed_token(Weight goal) {
    return token_of_sum(goal, [&](int i) { return weights_[i]; });
  }
  /// First token with that logit.
  __device__ int first_token(float logit) {
    return token_of_sum(1, [&](int i) { return Weight(logits_[i] == logit); });
  }

 private:
  /// Weight of the tokens with that logit: all of them have the same.
  __device__ Weight weight_of(uint32_t key) {
    Weight equal = 0;
    for (int i = begin_ + int(threadIdx.x); i < end_; i += kSampleThreads) {
      if (key_of(logits_[i]) == key) equal = weights_[i];
    }
    return any(equal);
  }

  /// One warp: the digit at which the sum from the largest one first reaches `goal`.
  __device__ void find_digit(Weight before, Weight goal) {
    constexpr int kOfLane = kDigits / 32;
    const int lane = int(threadIdx.x), first = kDigits - 1 - lane * kOfLane;
    Weight sum = 0;
#pragma unroll
    for (int d = 0; d < kOfLane; ++d) sum += memory_.sums[first - d];
    const Weight of_lane = sum;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const Weight other = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += other;
    }
    Weight until = before + sum - of_lane;
    if (until >= goal || until + of_lane < goal) return;
    int digit = first;
    while (until + memory_.sums[digit] < goal) until += memory_.sums[digit--];
    memory_.digit = uint32_t(digit), memory_.before = until;
  }

  /// Lanes with a common digit add their values once.
  __device__ void add_to_digit(bool counts, uint32_t digit, Weight value) {
    const unsigned active = __ballot_sync(~0u, counts);
    if (!counts) return;
    const unsigned peers = __match_any_sync(active, digit);
    // Values are below 2^41: sums of their halves have 26 bits.
    constexpr int kHalf = 21;
    const unsigned low = __reduce_add_sync(peers, unsigned(value & ((1u << kHalf) - 1)));
    const unsigned high = __reduce_add_sync(peers, unsigned(value >> kHalf));
    if (int(threadIdx.x % 32) == __ffs(int(peers)) - 1) {
      atomicAdd(&memory_.digits[digit], (Weight(high) << kHalf) + low);
    }
  }

  __device__ Weight block_sum(Weight value) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    __syncthreads();
    if (threadIdx.x % 32 == 0) memory_.tile[threadIdx.x / 32] = value;
    __syncthreads();
    Weight sum = 0;
    for (const Weight warp : memory_.tile) sum += warp;
    return sum;
  }
  /// Sum over all threads of the cluster.
  __device__ Weight total(Weight value) {
    const Weight of_block = block_sum(value);
    if (threadIdx.x == 0) memory_.total = of_block;
    cluster_.sync();
    Weight result = 0;
    for (int b = 0; b < kBlocksPerRow; ++b) {
      result += cluster_.map_shared_rank(&memory_, b)->total;
    }
    cluster_.sync();
    return result;
  }
  /// The value that threads have, where it is not 0, and all the same.
  __device__ Weight any(Weight value) {
    if (threadIdx.x == 0) memory_.total = 0;
    __syncthreads();
    if (value) memory_.total = value;
    cluster_.sync();
    Weight result = 0;
    for (int b = 0; b < kBlocksPerRow; ++b) {
      result = max(result, cluster_.map_shared_rank(&memory_, b)->total);
    }
    cluster_.sync();
    return result;
  }

  /// First token at which the sum of value(token) over tokens in their order reaches `goal`.
  template <typename Value>
  __device__ int token_of_sum(Weight goal, const Value& value) {
    Weight sum = 0;
    for (int i = begin_ + int(threadIdx.x); i < end_; i += kSampleThreads) sum += value(i);
    sum = block_sum(sum);
    if (threadIdx.x == 0) memory_.total = sum, memory_.token = -1;
    cluster_.sync();
    Weight before = 0;
    for (int b = 0; b < int(cluster_.block_rank()); ++b) {
      before += cluster_.map_shared_rank(&memory_, b)->total;
    }
    if (before < goal && before + sum >= goal) find_in_block(goal - before, value);
    cluster_.sync();
    int token = -1;
    for (int b = 0; b < kBlocksPerRow; ++b) {
      token = max(token, cluster_.map_shared_rank(&memory_, b)->token);
    }
    cluster_.sync();
    return token;
  }
  template <typename Value>
  __device__ void find_in_block(Weight goal, const Value& value) {
    for (int first = begin_; first < end_; first += kSampleThreads) {
      const int i = first + int(threadIdx.x), lane = int(threadIdx.x % 32);
      Weight sum = i < end_ ? value(i) : 0;
      const Weight local = sum;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const Weight other = __shfl_up_sync(~0u, sum, offset);
        if (lane >= offset) sum += other;
      }
      __syncthreads();
      if (lane == 31) memory_.tile[threadIdx.x / 32] = sum;
      __syncthreads();
      Weight before = 0, all = 0;
      for (int w = 0; w < kSampleThreads / 32; ++w) {
        if (w < int(threadIdx.x / 32)) before += memory_.tile[w];
        all += memory_.tile[w];
      }
      sum += before;
      if (sum >= goal && sum - local < goal) memory_.token = i;
      if (all >= goal) return;
      goal -= all;
    }
  }

  const cg::cluster_group cluster_;
  SampleMemory& memory_;
  const float* logits_;
  Weight* weights_;
  int begin_, end_;
  bool is_bad_ = false;
};

__global__ void __cluster_dims__(kBlocksPerRow, 1, 1) __launch_bounds__(kSampleThreads)
    sample_kernel(const float* logits, int64_t stride, int vocab, const SampleOptions* options,
                  Weight* scratch, Sampled* sampled) {
  __shared__ SampleMemory memory;
  const int64_t row = blockIdx.y;
  const SampleOptions o = options[row];
  RowOfLogits tokens(memory, logits + row * stride, scratch + row * vocab, vocab);
  const float top = tokens.largest();
  const bool writes = blockIdx.x == 0 && threadIdx.x == 0;
  if (tokens.is_bad()) {
    if (writes) sampled[row] = {-1, 0};
    return;
  }
  const double log_sum = tokens.log_sum(top);
  int token;
  if (o.temperature == 0) {
    token = tokens.first_token(top);
  } else {
    Weight total = tokens.weigh(top, o.temperature);
    const bool few = o.top_k > 0 && o.top_k < vocab;
    if (few) total = tokens.first_weights(Weight(o.top_k));
    Weight remaining = total;
    if (o.top_p < 1) {
      remaining = tokens.reaching_weights(max(Weight(1), Weight(ceil(o.top_p * double(total)))));
    }
    const Weight goal = min(remaining, Weight(o.uniform * double(remaining)) + 1);
    token = few || o.top_p < 1 ? tokens.sorted_token(goal) : tokens.indexed_token(goal);
  }
  if (writes) sampled[row] = {token, float(double(logits[row * stride + token]) - top - log_sum)};
}

constexpr int kFeedThreads = 128;

__global__ void __launch_bounds__(kFeedThreads)
    feed_kernel(const Sampled* sampled, int32_t* tokens, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kFeedThreads + threadIdx.x;
  if (i < count && tokens[i] < 0) tokens[i] = max(0, sampled[-1 - tokens[i]].token);
}

}  // namespace

int64_t sample_scratch(int64_t vocab) {
  return vocab * int64_t(sizeof(Weight));
}

void sample_rows(cudaStream_t stream, const Tensor& logits, const Tensor& options,
                 const Tensor& scratch, const Tensor& sampled) {
  const int64_t rows = logits.dim(0), vocab = logits.dim(1);
  require_dtype("sample_rows: logits", logits, DType::f32);
  require_shape("sample_rows: options", options, {rows, int64_t(sizeof(SampleOptions))});
  require_shape("sample_rows: sampled", sampled, {rows, int64_t(sizeof(Sampled))});
  require_shape("sample_rows: scratch", scratch, {rows, sample_scratch(vocab)});
  if (rows == 0) return;
  sample_kernel<<<dim3(kBlocksPerRow, unsigned(rows)), kSampleThreads, 0, stream>>>(
      logits.as<float>(), logits.stride(0), int(vocab),
      reinterpret_cast<const SampleOptions*>(options.data()),
      reinterpret_cast<Weight*>(scratch.data()), reinterpret_cast<Sampled*>(sampled.data()));
  check_launch("sample_rows");
}

void feed_tokens(cudaStream_t stream, const Tensor& sampled, const Tensor& tokens) {
  const int64_t count = tokens.elements();
  require_dtype("feed_tokens: tokens", tokens, DType::i32);
  if (count == 0) return;
  feed_kernel<<<unsigned((count - 1) / kFeedThreads + 1), kFeedThreads, 0, stream>>>(
      reinterpret_cast<const Sampled*>(sampled.data()), tokens.as<int32_t>(), count);
  check_launch("feed_tokens");
}

}  // namespace tandem::gpu
