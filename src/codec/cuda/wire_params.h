// Kernel parameters: a grouped wire format and the layout of one message.
#pragma once

#include <bit>

#include "codec/message.h"
#include "codec/numbers.h"

namespace tandem::gpu {

constexpr int kQuad = 4;  ///< threads per block of elements

struct WireParams {
  codec::Message layout;
  int group = 128;
  int shift = 7;  ///< group == 1 << shift
  ScaleKind scale = ScaleKind::bf16;
  bool spikes = false, hadamard = false;
  float limit = 0;  ///< largest value of the tensor's dtype

  /// Parameters for messages of `elements`.
  static WireParams of(const Wire& wire, int64_t elements, DType dtype) {
    return {codec::Message::of(wire, elements),
            wire.group,
            std::countr_zero(unsigned(wire.group)),
            wire.scale,
            wire.spikes,
            wire.hadamard,
            codec::largest_of(dtype)};
  }
};

}  // namespace tandem::gpu
