// Common parts of the collectives over a wire format: cutting a rank's elements into messages, and
// processing a message.
#pragma once

#include <algorithm>
#include <vector>

#include "codec/tile.h"
#include "collectives/call.h"

namespace tandem::collectives {

/// Throws InvalidArgument unless the residual of an error feedback, if given, is f32, has as many
/// elements as `data`, and is contiguous, writable host memory that does not overlap `data`. Throws
/// Unsupported on GPU ranks.
void require_encoded(const char* op, const Communicator& comm, const Wire& wire, const Tensor& data,
                     const Tensor* residual = nullptr);

/// Elements [begin, begin + count) of a tensor.
using Elements = Shard;

/// Messages of one call in format `wire`. Chunks are whole blocks, so decoded values do not depend
/// on the chunk size.
class Encoded {
 public:
  /// `largest`: max elements of a transfer between two ranks. 0: each transfer is cut by its own
  /// size.
  Encoded(Call& call, const Wire& wire, DType dtype, int64_t largest);

  /// Number of chunks of a transfer of `largest` elements, or of `elements`.
  int64_t steps() const { return steps_; }
  int64_t steps_of(int64_t elements) const;
  /// Chunk `step` of `shard`; empty before step 0 and past its end.
  Elements chunk(const Elements& shard, int64_t step) const;

  /// Encodes `count` values plus `residual`, stores the error in `residual`, and returns the
  /// message's bytes. `residual` may be null.
  size_t encode(const std::byte* values, int64_t count, float* residual, std::byte* message) const;
  void decode(const std::byte* message, int64_t count, std::byte* values) const;
  void send(Stream stream, int peer, const std::byte* values, int64_t count, float* residual);
  void receive(Stream stream, int source, std::byte* values, int64_t count);

  /// Summand of a reduction: a message, or uncompressed elements.
  struct Partial {
    const std::byte* bytes;
    bool is_message;
  };
  /// out = the sum of `partials` in their order, in f32, rounded once. `out` may be an uncompressed
  /// part.
  void reduce(const std::vector<Partial>& partials, int64_t count, std::byte* out);
  /// Also encodes the sum plus residual into `message`, and decodes that into `out`.
  size_t reduce_into(const std::vector<Partial>& partials, int64_t count, float* residual,
                     std::byte* message, std::byte* out);

 private:
  class Sum;
  int64_t chunk_for(int64_t elements) const;

  Call& call_;
  const Wire wire_;
  const DType dtype_;
  int64_t chunk_ = 0, steps_ = 0;
  std::vector<std::vector<std::byte>> exact_;  // decoded chunks of lossless messages, by part
};

/// Copy of a residual for messages that are encoded before all ranks have agreed: the caller's only
/// changes on store(). Does nothing without a residual.
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
