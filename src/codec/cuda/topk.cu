// Sparse messages on GPUs: one thread block a chunk, the CPU's bytes and values (codec/topk.h).
#include <cuda_runtime_api.h>

#include <string>

#include "codec/topk.h"
#include "codec/topk_levels.h"
#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "tandem/error.h"

namespace tandem::codec {
namespace {

using gpu::check_launch;

constexpr int kThreads = 256;
constexpr int kPerThread = kMaxTopKChunk / kThreads;
constexpr int kMaxRecord = 1 + kMaxTopKChunk * (kTopKIndexBits + 8) / 32;

// Slot of a value in shared memory: threads that walk kPerThread consecutive values use different
// banks.
__device__ int slot(int i) {
  return i + i / kPerThread;
}

__device__ uint32_t magnitude(float x) {
  return bits_of(x) & 0x7fffffffu;
}

struct Chunk {
  float value[kMaxTopKChunk + kThreads];
  uint32_t digits[256];  // values by digit, during the search
  uint32_t record[kMaxRecord];
  uint32_t sums_of_warps[kThreads / 32];
  uint32_t largest, threshold;
  int ties;
};

// Sum over the threads before this one, of all threads of the block. The sums of two counts of at
// most kMaxTopKChunk fit into one word.
__device__ uint32_t sum_before(Chunk& chunk, uint32_t value) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  uint32_t all = value;
  for (int by = 1; by < 32; by *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, all, by);
    if (lane >= by) all += other;
  }
  if (lane == 31) chunk.sums_of_warps[warp] = all;
  __syncthreads();
  for (int w = 0; w < warp; ++w) all += chunk.sums_of_warps[w];
  return all - value;
}

// Largest digit with at least `left` values at it or above it, by warp 0: each lane has 8 digits.
// `left` becomes the number to take at the digit.
__device__ uint32_t find_digit(const Chunk& chunk, int& left) {
  const int lane = int(threadIdx.x);
  int local = 0;
  for (int d = 8 * lane; d < 8 * lane + 8; ++d) local += int(chunk.digits[d]);
  int from = local;  // of this lane's digits and all above
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_down_sync(~0u, from, by);
    if (lane + by < 32) from += other;
  }
  const unsigned reached = __ballot_sync(~0u, from >= left);
  const int last = 31 - __clz(int(reached));
  int digit = 8 * lane + 7, above = from - local;
  if (lane == last) {
    for (; above + int(chunk.digits[digit]) < left; --digit) above += int(chunk.digits[digit]);
  }
  left -= __shfl_sync(~0u, above, last);
  return uint32_t(__shfl_sync(~0u, digit, last));
}

// Sets the k-th largest magnitude and how many of that magnitude are sent, a digit of 8 bits at a
// time.
__device__ void select(Chunk& chunk, int count, int k) {
  uint32_t prefix = 0;
  int left = k;
  for (int shift = 24; shift >= 0; shift -= 8) {
    chunk.digits[threadIdx.x] = 0;
    __syncthreads();
    for (int i = int(threadIdx.x); i < count; i += kThreads) {
      const uint32_t word = magnitude(chunk.value[slot(i)]);
      if (shift == 24 || word >> (shift + 8) == prefix) {
        atomicAdd(&chunk.digits[word >> shift & 0xffu], 1u);
      }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      prefix = prefix << 8 | find_digit(chunk, left);
      if (threadIdx.x == 0) chunk.threshold = prefix, chunk.ties = left;
    }
    __syncthreads();
    prefix = chunk.threshold;
  }
}

// Puts field `index` of the record, `bits` wide, into its one or two words.
__device__ void put(Chunk& chunk, int index, uint32_t field, int bits) {
  const int at = index * bits, word = 1 + at / 32;
  const uint64_t shifted = uint64_t(field) << (at % 32);
  atomicOr(&chunk.record[word], uint32_t(shifted));
  if (at % 32 + bits > 32) atomicOr(&chunk.record[word + 1], uint32_t(shifted >> 32));
}

__global__ void __launch_bounds__(kThreads)
    encode_topk_kernel(const TopK topk, float beta, const float* delta, float* error,
                       int64_t elements, uint32_t* message) {
  __shared__ Chunk chunk;
  const int64_t first = int64_t(blockIdx.x) * topk.chunk;
  const int count = topk.count_of(blockIdx.x, elements), words = topk.words(count);
  uint32_t* record = message + int64_t(blockIdx.x) * topk.words(topk.chunk);
  if (threadIdx.x == 0) chunk.largest = 0;
  for (int i = int(threadIdx.x); i < words; i += kThreads) chunk.record[i] = 0;
  __syncthreads();
  uint32_t largest = 0;
  for (int i = int(threadIdx.x); i < count; i += kThreads) {
    const float e = sum(product(error[first + i], beta), delta[first + i]);
    chunk.value[slot(i)] = e;
    largest = max(largest, magnitude(e));
  }
  atomicMax(&chunk.largest, largest);
  __syncthreads();
  select(chunk, count, topk.sent(count));
  const auto levels = TopKLevels::of(chunk.threshold, chunk.largest, topk.bits);
  // Values above the threshold (low half) and at it, of this thread's consecutive ones.
  const int begin = int(threadIdx.x) * kPerThread, end = min(begin + kPerThread, count);
  uint32_t counts = 0;
  for (int i = begin; i < end; ++i) {
    const uint32_t word = magnitude(chunk.value[slot(i)]);
    counts += word > chunk.threshold ? 1u : word == chunk.threshold ? 1u << 16 : 0;
  }
  const uint32_t before = sum_before(chunk, counts);
  int ties = int(before >> 16), at = int(before & 0xffffu) + min(ties, chunk.ties);
  for (int i = begin; i < end; ++i) {
    const float value = chunk.value[slot(i)];
    const uint32_t word = magnitude(value);
    if (word < chunk.threshold || (word == chunk.threshold && ties++ >= chunk.ties)) continue;
    const uint32_t code = levels.code(value, topk.bits);
    put(chunk, at++, uint32_t(i) | code << kTopKIndexBits, kTopKIndexBits + topk.bits);
    const float rest = sum(value, -levels.value(code, topk.bits));
    chunk.value[slot(i)] = fabsf(rest) <= largest_of(DType::f32) ? rest : 0;
  }
  if (threadIdx.x == 0) chunk.record[0] = levels.stored();
  __syncthreads();
  for (int i = int(threadIdx.x); i < count; i += kThreads) error[first + i] = chunk.value[slot(i)];
  for (int i = int(threadIdx.x); i < words; i += kThreads) record[i] = chunk.record[i];
}

struct Messages {
  const uint32_t* at[kMaxTopKMessages];
  int count = 0;
};

__global__ void __launch_bounds__(kThreads)
    mean_topk_kernel(const TopK topk, const __grid_constant__ Messages messages, TopKMean mean,
                     float* values, int64_t elements) {
  __shared__ float sums[kMaxTopKChunk];
  __shared__ uint16_t senders[kMaxTopKChunk];
  const int64_t first = int64_t(blockIdx.x) * topk.chunk;
  const int count = topk.count_of(blockIdx.x, elements), sent = topk.sent(count);
  const int bits = kTopKIndexBits + topk.bits;
  for (int i = int(threadIdx.x); i < count; i += kThreads) sums[i] = 0, senders[i] = 0;
  for (int m = 0; m < messages.count; ++m) {
    __syncthreads();  // the indices of a record differ
    const uint32_t* record = messages.at[m] + int64_t(blockIdx.x) * topk.words(topk.chunk);
    const auto levels = TopKLevels::from_stored(record[0]);
    for (int n = int(threadIdx.x); n < sent; n += kThreads) {
      const int at = n * bits, word = 1 + at / 32;
      uint64_t field = record[word];
      if (at % 32 + bits > 32) field |= uint64_t(record[word + 1]) << 32;
      field >>= at % 32;
      const int index = int(field & ((1u << kTopKIndexBits) - 1));
      const uint32_t code = uint32_t(field >> kTopKIndexBits) & ((1u << topk.bits) - 1);
      if (index >= count) continue;
      sums[index] = sum(sums[index], levels.value(code, topk.bits));
      ++senders[index];
    }
  }
  __syncthreads();
  for (int i = int(threadIdx.x); i < count; i += kThreads) {
    const int divisor = mean == TopKMean::ranks ? messages.count : max(int(senders[i]), 1);
    values[first + i] = __fdiv_rn(sums[i], float(divisor));
  }
}

}  // namespace

void encode_topk_on_gpu(const Exec& exec, const TopK& topk, float beta, const Tensor& delta,
                        const Tensor& error, std::byte* message) {
  const int64_t elements = delta.elements();
  if (elements == 0) return;
  encode_topk_kernel<<<unsigned(topk.chunks(elements)), kThreads, 0, exec.stream>>>(
      topk, beta, delta.as<const float>(), error.as<float>(), elements,
      reinterpret_cast<uint32_t*>(message));
  check_launch("encode_topk_kernel");
}

void mean_topk_on_gpu(const Exec& exec, const TopK& topk,
                      std::span<const std::byte* const> messages, TopKMean mean,
                      const Tensor& values) {
  const int64_t elements = values.elements();
  if (messages.size() > kMaxTopKMessages) {
    throw Unsupported("mean_topk: " + std::to_string(messages.size()) +
                      " messages on a GPU: expected at most " + std::to_string(kMaxTopKMessages));
  }
  if (elements == 0) return;
  Messages all;
  for (const std::byte* message : messages) {
    all.at[all.count++] = reinterpret_cast<const uint32_t*>(message);
  }
  mean_topk_kernel<<<unsigned(topk.chunks(elements)), kThreads, 0, exec.stream>>>(
      topk, all, mean, values.as<float>(), elements);
  check_launch("mean_topk_kernel");
}

}  // namespace tandem::codec
