// What the collectives over a wire format have in common: how a rank's part is cut into messages,
// and what happens to a message.
#pragma once

#include <algorithm>
#include <vector>

#include "codec/tile.h"
#include "collectives/call.h"

namespace tandem::collectives {

/// Throws InvalidArgument unless the residual of an error feedback, where there is one, is f32, of
/// as many elements as `data`, contiguous host memory, writable and apart from `data`. Throws
/// Unsupported on GPU ranks.
void require_encoded(const char* op, const Communicator& comm, const Wire& wire, const Tensor& data,
                     const Tensor* residual = nullptr);

/// Elements [begin, begin + count) of a tensor.
using Elements = Shard;

/// `wire`'s messages of one call. Chunks are whole blocks, so what is decoded does not depend on
/// how large they are.
class Encoded {
 public:
  /// `largest`: elements of the largest part that goes from one rank to another. 0 where every part
  /// is cut by its own size.
  Encoded(Call& call, const Wire& wire, DType dtype, int64_t largest);

  /// Steps in which a part of `largest` elements, or of `elements`, has a chunk.
  int64_t steps() const { return steps_; }
  int64_t steps_of(int64_t elements) const;
  /// Chunk `step` of `part`; empty before step 0 and past its end.
  Elements chunk(const Elements& part, int64_t step) const;

  /// Encodes `count` values, with what `residual` holds added to them and the error left in it, and
  /// returns the message's bytes. `residual` may be null.
  size_t encode(const std::byte* values, int64_t count, float* residual, std::byte* message) const;
  void decode(const std::byte* message, int64_t count, std::byte* values) const;
  void send(Stream stream, int peer, const std::byte* values, int64_t count, float* residual);
  void receive(Stream stream, int source, std::byte* values, int64_t count);

  /// One summand of a reduction: a message, or elements as they are.
  struct Part {
    const std::byte* bytes;
    bool is_message;
  };
  /// out = the sum of `parts` in their order, in f32, rounded once. `out` may be a part that is no
  /// message.
  void reduce(const std::vector<Part>& parts, int64_t count, std::byte* out);
  /// The same; the sum plus the residual goes into `message`, and what that decodes as into `out`.
  size_t reduce_into(const std::vector<Part>& parts, int64_t count, float* residual,
                     std::byte* message, std::byte* out);

 private:
  class Sum;
  int64_t piece_for(int64_t elements) const;

  Call& call_;
  const Wire wire_;
  const DType dtype_;
  int64_t piece_ = 0, steps_ = 0;
  std::vector<std::vector<std::byte>> exact_;  // decoded chunks of lossless messages, by part
};

/// A residual while its message is encoded before all ranks have agreed: the caller's changes only
/// when that is stored. Without one, nothing.
class PendingResidual {
 public:
  PendingResidual(float* residual, int64_t elements) : residual_(residual) {
    if (residual) values_.assign(residual, residual + elements);
  }
  float* at(int64_t element) { return residual_ ? values_.data() + element : nullptr; }
  void store() const { std::ranges::copy(values_, residual_); }

 private:
  float* const residual_;
  std::vector<float> values_;
};

}  // namespace tandem::collectives
