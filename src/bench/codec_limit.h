// What an encoded collective cannot be faster than, beside its bytes on the link: the codec's own
// work and the transport's, which share the rank's core. Both are timed alone, in the same rounds
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

/// Elements that one call encodes and decodes on this rank, part by part.
struct CodecParts {
  std::vector<int64_t> encoded, decoded;
};

/// Encodes and decodes so many elements, as much at a time as a collective does, and nothing else:
/// nothing is sent or added.
class CodecWork {
 public:
  /// `from` has as many elements as any part of `parts`, and so has `to`, which is written.
  CodecWork(const Wire& wire, const CodecParts& parts, const Tensor& from, const Tensor& to);
  void run();

 private:
  void encode_part(int64_t elements);
  void decode_part(int64_t elements);

  const Wire wire_;
  const CodecParts parts_;
  const Tensor from_, to_;
  std::vector<std::byte> message_;
  std::map<int64_t, std::vector<std::byte>> messages_;  ///< by elements, to be decoded
};

/// Moves so many bytes as the transport does on this rank's core, with no other rank and no link's
/// limit: between hosts through the kernel's loopback, pages lent and copied out (a send and a
/// receive, as many bytes as a rank sends and receives); else one copy in memory.
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
