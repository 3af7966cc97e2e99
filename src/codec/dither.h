// Stochastic rounding of the integer codecs: a code is rounded up with a probability equal to the
// fraction that rounding drops, so the mean of the decoded values over seeds is the value itself
// (subtractive noise left out: QSGD, arXiv 1610.02132, section 3.1). The error is at most one step
// of the group, twice that of `encode`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/message.h"

namespace tandem::codec {

/// Selects the random numbers of one message: a function of both and of an element's index, the
/// same on every processor. Messages whose errors must be independent differ in one of them.
struct Dither {
  uint64_t seed = 0, stream = 0;
};

/// Elements whose noise is drawn at a time: 16 numbers of four words each.
constexpr int kNoiseBlock = 64;

/// Noise in (-1/2, 1/2) of elements [first, first + count), in steps of a code: element i takes
/// word i / 16 % 4 of philox(seed, stream, i / 64 * 16 + i % 16). `first` and `count` are multiples
/// of kNoiseBlock.
void fill_noise(const Dither& dither, int64_t first, int count, float* noise);

/// Whether `wire` can be rounded stochastically: integers. Spikes are rounded to nearest, and the
/// levels of `asym` with `log2` may end half a step before the range.
constexpr bool can_dither(const Wire& wire) {
  return is_integer(wire.codec) && !wire.spikes &&
         !(wire.asymmetric && wire.scale == ScaleKind::log2);
}

/// Same as `encode`, with stochastic rounding; `decode` reads the message. The mean over seeds is
/// exact to 2^-17 of a step if it is decoded in f32, except in groups that reach the end of the
/// range of f32. Values that are a code times the scale, such as 0 in symmetric formats, are
/// decoded as without noise. Throws InvalidArgument as `encode`, for values that are not f32, and
/// unless can_dither(wire).
size_t encode_dithered(const Wire& wire, const Tensor& values, const Dither& dither,
                       std::span<std::byte> message);

}  // namespace tandem::codec
