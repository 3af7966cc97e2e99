// Rows of context-parallel ranks in messages and in scratch: the fields of a chunk of positions
// (such as its keys and values) next to each other, so that a chunk is one transfer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/block_attention.h"
#include "schedule/context.h"

namespace tandem {

class ChunkMessage {
 public:
  /// Columns of a row; f32 fields come first, so that all fields are aligned.
  struct Field {
    DType dtype;
    int64_t columns;
  };
  /// A message of `batch` sequences. `max_head`: max positions of the head chunk.
  ChunkMessage(int64_t batch, int64_t max_head, std::vector<Field> fields);

  /// Exact bytes of `positions` of each sequence.
  size_t chunk_bytes(int64_t positions) const { return size_t(batch_ * positions) * row_bytes_; }
  size_t bytes(const schedule::ContextRows& rows) const { return chunk_bytes(rows.count()); }
  /// Byte offset of the tail chunk.
  size_t tail_at() const { return tail_at_; }
  /// Bytes to allocate for rows with a tail of at most `max_tail` positions.
  size_t capacity(int64_t max_tail) const;
  /// Field `index` of a message at `base`, which has `rows`.
  cpu::ChunkRows field(std::byte* base, const schedule::ContextRows& rows, int index) const;

 private:
  int64_t batch_;
  std::vector<Field> fields_;
  size_t row_bytes_ = 0, tail_at_;
};

}  // namespace tandem
