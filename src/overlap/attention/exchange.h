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
            const std::byte* source, size_t offset, int slot) {
    send_head(peer, message, rows, source, offset, slot);
    send_tail(peer, message, rows, source, offset, slot);
  }
  /// Sends them in two steps: the tail's signal stands for both, so it comes second.
  void send_head(int peer, const ChunkMessage& message, const schedule::ContextRows& rows,
                 const std::byte* source, size_t offset, int slot);
  void send_tail(int peer, const ChunkMessage& message, const schedule::ContextRows& rows,
                 const std::byte* source, size_t offset, int slot);
  /// Returns once all chunks of the message in `slot` from `peer` have arrived.
  void await(int slot, int peer) { workspace_.await(slot, peer, slot); }
  /// Returns once its head has, if that has rows.
  void await_head(int slot, int peer) { workspace_.await(slots_ + slot, peer, slot); }

 private:
  int slots_;
  OverlapWorkspace workspace_;
};

/// Calls body(block of one chunk of keys) for both, in the order of the partial sums, if queries
/// read it.
template <typename Body>
void each_slice(const ContextGrid& grid, const cpu::AttentionBlock& block, bool is_local,
                const Body& body) {
  for (const bool tail : {is_local, !is_local}) {
    cpu::AttentionBlock slice = block;
    slice.rows = grid.slice(block.rows, tail, block.mask.window);
    if (!slice.rows.empty()) body(slice);
  }
}

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
