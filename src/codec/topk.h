// Sparse messages: of each chunk of values the k largest magnitudes, as 12-bit indices and signed
// levels, with error feedback (SparseLoCo, arXiv 2508.15706, algorithm 1; DeMo, arXiv 2411.19870,
// algorithm 1). The size depends only on the number of values, and a message is a pure function of
// them, the same on every processor.
//
// A chunk's record is a 32-bit word, the bf16 of the lowest level (low half) and of the distance of
// levels, and then for each value sent, by increasing index, 12 bits of index and `bits` of code
// (level, and a sign above it), packed from the lowest bit of little-endian words on. The last
// record ends with zeros up to its last word.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/exec.h"

namespace tandem::codec {

constexpr int kMaxTopKChunk = 4096;  ///< of 12-bit indices

struct TopK {
  int chunk = kMaxTopKChunk;  ///< values a chunk, 1 to 4096; chunks count from the first value
  int k = 64;                 ///< values sent of a whole chunk, 1 to `chunk`
  int bits = 2;               ///< of a value sent, 2 to 8: its sign and 2^(bits - 1) levels

  /// Throws InvalidArgument for a setting that is out of range.
  void check() const;

  /// Values sent of a chunk of `count`: the last one may be shorter. At least one.
  constexpr int sent(int count) const { return int((int64_t(k) * count + chunk - 1) / chunk); }
  /// 32-bit words of the record of a chunk of `count`.
  constexpr int words(int count) const { return 1 + (sent(count) * (12 + bits) + 31) / 32; }
  constexpr int64_t chunks(int64_t elements) const { return (elements + chunk - 1) / chunk; }
  /// Values of chunk `index` of `elements`.
  constexpr int count_of(int64_t index, int64_t elements) const {
    const int64_t rest = elements - index * chunk;
    return int(rest < chunk ? rest : chunk);
  }
  /// Size of a message.
  constexpr int64_t bytes(int64_t elements) const {
    const int rest = int(elements % chunk);
    return 4 * (elements / chunk * words(chunk) + (rest ? words(rest) : 0));
  }
};

/// error = beta * error + delta; `message` (topk.bytes(), 4-byte aligned) holds the k largest of
/// each chunk, of equal magnitudes those of lower index; error -= what `message` decodes to. The
/// k-th and the largest magnitude of a chunk span its levels, in the middle of 2^(bits - 1) equal
/// intervals: a value sent is off by at most half an interval, and 2^-8 of the largest (plus
/// 2^(bits - 127): intervals below 2^-126 count as none).
///
/// A chunk with NaN or an infinity decodes as NaN wherever it sends a value, and the error of those
/// becomes 0. `delta` and `error`: contiguous f32 of one size on exec's device.
void encode_topk(const Exec& exec, const TopK& topk, float beta, const Tensor& delta,
                 const Tensor& error, std::byte* message);

/// Divisor of a mean of sparse messages.
enum class TopKMean : uint8_t {
  ranks,    ///< the number of messages (SparseLoCo)
  senders,  ///< the number of messages that hold the value (DeMo)
};

/// values = the mean of the messages, added in f32 in order; 0 where none holds a value. Whatever
/// the messages hold, reads stay inside them and writes inside `values`. Throws Unsupported for
/// more than kMaxTopKMessages on a GPU.
void mean_topk(const Exec& exec, const TopK& topk, std::span<const std::byte* const> messages,
               TopKMean mean, const Tensor& values);
constexpr int kMaxTopKMessages = 256;

/// GPU form: codec/cuda/topk.cu.
void encode_topk_on_gpu(const Exec& exec, const TopK& topk, float beta, const Tensor& delta,
                        const Tensor& error, std::byte* message);
void mean_topk_on_gpu(const Exec& exec, const TopK& topk,
                      std::span<const std::byte* const> messages, TopKMean mean,
                      const Tensor& values);

}  // namespace tandem::codec
