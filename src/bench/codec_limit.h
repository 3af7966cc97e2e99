// Lower bounds of an encoded collective's time, besides its bytes on the link: work of the codec
// and of the transport, which share the rank's core. Both are timed separately, in the same rounds
// as the collective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "tandem/codec.h"
#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem {

/// Elements that one call encodes and decodes on this rank, per message.
struct CodecSizes {
  std::vector<int64_t> encoded, decoded;
};

/// Encodes and decodes the same elements as a collective, in the same chunk size, without sending
/// or adding.
class CodecWork {
 public:
  /// `from` and `to` have at least as many elements as any of `sizes`; `to` is written.
  CodecWork(const Wire& wire, const CodecSizes& sizes, const Tensor& from, const Tensor& to);
  void run();

 private:
  void encode_values(int64_t elements);
  void decode_values(int64_t elements);

  const Wire wire_;
  const CodecSizes sizes_;
  const Tensor from_, to_;
  std::vector<std::byte> message_;
  std::map<int64_t, std::vector<std::byte>> messages_;  ///< messages to decode, by number of
                                                        ///< elements
};

/// Moves the same bytes as the transport on this rank's core, without other ranks and link limits:
/// between hosts through the kernel's loopback with zero-copy pages, copied out on receive (one
/// send and one receive of the bytes); else one copy in memory.
class TransportWork {
 public:
  TransportWork(const Communicator& comm, int64_t bytes);
  ~TransportWork();
  void run();

 private:
  class Loopback;
  const int64_t bytes_;
  std::vector<std::byte> source_, target_;
  std::unique_ptr<Loopback> loopback_;
};

}  // namespace tandem
