// Common state of the forms: a rank's operands in scratch, the block kernel, and the transfer of a
// message's chunks.
#pragma once

#include "collectives/symmetric_workspace.h"
#include "overlap/attention/form.h"
#include "overlap/attention/rows.h"

namespace tandem {

/// Signals of `slots` messages: of the tail's chunk, which stands for both, and of the head's.
class ContextExchange {
 public:
  ContextExchange(Communicator& comm, size_t shared_bytes, size_t private_bytes, int slots)
      : slots_(slots),
        workspace_(comm, "context_attention", shared_bytes, private_bytes, 2 * slots) {}

  /// Bytes that it allocates: for two runs.
  static size_t bytes(size_t shared_bytes, size_t private_bytes) {
    return 2 * (shared_bytes + private_bytes);
  }

  void begin() { workspace_.begin(); }
  std::byte* shared() const { return workspace_.shared(); }
  std::byte* scratch() const { return workspace_.scratch(); }
  /// Puts the chunks of a message with `rows`, which are at `source`, to byte `offset` of the
  /// peer's shared memory. Without rows only the signal is sent.
  void send(int peer, const ChunkMessage& message, const schedule::ContextRows& rows,
            const std::byte* source, size_t offset, int slot);
  /// Returns once all chunks of the message in `slot` from `peer` have arrived.
  void await(int slot, int peer) { workspace_.await(slot, peer, slot); }

 private:
  int slots_;
  OverlapWorkspace workspace_;
};

/// A message's scratch, allocated once.
struct ContextScratch {
  ContextScratch(const ChunkMessage& of, int64_t max_tail)
      : message(of), memory(message.capacity(max_tail)) {}
  cpu::ChunkRows field(const schedule::ContextRows& rows, int index = 0) const {
    return message.field(memory.data(), rows, index);
  }
  ChunkMessage message;
  Memory memory;
};

}  // namespace tandem
