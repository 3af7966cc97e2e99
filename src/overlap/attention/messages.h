// Rows of context-parallel ranks in messages and in scratch: the fields of a chunk of positions
// (such as its keys and values) next to each other, so that a chunk is one transfer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/block_attention.h"
#include "schedule/context.h"
#include "tandem/codec.h"

namespace tandem {

class ChunkMessage {
 public:
  /// Columns of a row; f32 fields come first, so that all fields are aligned.
  struct Field {
    DType dtype;
    int64_t columns;
  };
  /// A message of `batch` sequences. `max_head`: max positions of the head chunk. With a wire
  /// format each field of a chunk is one encoded message.
  ChunkMessage(int64_t batch, int64_t max_head, std::vector<Field> fields, const Wire& wire = {});

  /// Exact bytes of `positions` of each sequence.
  size_t chunk_bytes(int64_t positions) const;
  size_t bytes(const schedule::ContextRows& rows) const {
    return chunk_bytes(rows.head.count) + chunk_bytes(rows.tail.count);
  }
  /// Byte offset of the tail chunk.
  size_t tail_at() const { return tail_at_; }
  /// Bytes to allocate for rows with a tail of at most `max_tail` positions.
  size_t capacity(int64_t max_tail) const;
  /// Field `index` of an uncompressed message at `base`, which has `rows`.
  cpu::ChunkRows field(std::byte* base, const schedule::ContextRows& rows, int index) const;

  /// The encoded message `to` <- `uncompressed`, a message of the same fields and rows without a
  /// wire format, and back.
  void encode(const ChunkMessage& uncompressed, std::byte* from, const schedule::ContextRows& rows,
              std::byte* to) const;
  void decode(const ChunkMessage& uncompressed, const std::byte* from,
              const schedule::ContextRows& rows, std::byte* to) const;

 private:
  /// Calls body(tensor, offset of its encoded bytes) for the fields of both chunks, in parallel.
  template <typename Body>
  void each_field(const ChunkMessage& uncompressed, std::byte* base,
                  const schedule::ContextRows& rows, const Body& body) const;

  int64_t batch_;
  std::vector<Field> fields_;
  Wire wire_;
  size_t tail_at_;
};

/// Keys and values of a rank, as the kernel reads them and as they travel: rotated and, with a wire
/// format, rounded to it once by their owner. Every rank reads the decoded ones, their owner too,
/// so that the bits of a result do not depend on what travels. The same memory holds both without a
/// wire format.
struct KeyMessage {
  ChunkMessage rows, sent;
  bool is_encoded;

  /// Bytes of the decoded rows where they need memory of their own.
  size_t decoded_bytes(int64_t max_tail) const { return is_encoded ? rows.capacity(max_tail) : 0; }
  /// Rounds the rows at `base` to the wire format; `message` <- what is sent.
  void encode(std::byte* base, const schedule::ContextRows& of, std::byte* message) const {
    if (!is_encoded) return;
    sent.encode(rows, base, of, message);
    sent.decode(rows, message, of, base);
  }
  /// Rows of a received message: in `base` if they are encoded, else those of the message.
  std::byte* decoded(std::byte* message, const schedule::ContextRows& of, std::byte* base) const {
    if (!is_encoded) return message;
    sent.decode(rows, message, of, base);
    return base;
  }
};

}  // namespace tandem
