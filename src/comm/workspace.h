// Symmetric memory and epochs through which the uncompressed collectives stage their chunks.
//
// A stream carries chunks from one rank to another, in order, through `slots` slots of `slot_bytes`
// in the receiver's memory. Chunk c may be put once chunk c - slots was acknowledged. Counters only
// grow, so a stream is reused without a barrier. Each pair has three streams for traffic that could
// otherwise deadlock: contributions to a sum, results, and send/recv. A call's arguments, and
// payloads that are small enough, travel in an envelope next to the first chunk (two per pair,
// alternating).
//
// If all ranks share one address space, larger tensors are not staged at all: see
// collectives/direct.h, which needs one admission word and a signal for finished calls.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/call_card.h"
#include "comm/progress.h"
#include "tandem/communicator.h"

namespace tandem {

enum class Stream : uint8_t { reduce, gather, pair };
constexpr int kStreams = 3;
constexpr size_t kEnvelopeHeader = 128;

struct WorkspaceLayout {
  int ranks;
  int slots;
  size_t slot_bytes;      ///< max payload of one chunk
  size_t envelope_bytes;  ///< max bytes of an envelope with its header: 4 KiB + 32 B per rank

  static WorkspaceLayout of(int ranks);

  size_t envelope_at(int source, uint64_t call) const;
  size_t slot_at(Stream stream, int source, uint64_t chunk) const;
  size_t pair_header_at(int source, uint64_t chunk) const;
  size_t use_count_at() const;
  size_t card_at() const;
  size_t bytes() const;

  /// Max payload of an envelope.
  size_t small() const { return envelope_bytes - kEnvelopeHeader; }

  int arrived(Stream stream, int source) const;  ///< signal: chunks that arrived from source
  int freed(Stream stream, int peer) const;      ///< signal: chunks that peer has read
  int envelope(int source) const;                ///< signal: envelopes that arrived from source
  int done(int source) const;                    ///< signal: calls that source has finished
  int begun(int source) const;                   ///< signal: operator calls that source has begun
  int signals() const;
};

/// Access of ranks to each other's memory.
enum class Reach : uint8_t {
  no_addresses,    ///< memory of another process
  addresses_only,  ///< same process, but an emulated link lies between
  direct,          ///< any memory of a rank, including the caller's, by loads and stores
};

class Workspace {
 public:
  /// Raises `peer`'s `signal` to `epoch`.
  using Raise = std::function<void(int peer, int signal, uint64_t epoch)>;
  /// `cards`: by rank, nullptr if memory is not shared. `raise`: immediate, bypassing emulated
  /// links.
  Workspace(Communicator& comm, const WorkspaceLayout& layout_,
            std::shared_ptr<SymmetricBuffer> buffer_, Reach reach_, std::vector<CallCard*> cards_,
            Raise raise_);

  struct Counters {
    uint64_t sent = 0, received = 0;
  };
  /// Buffer in which a chunk for `peer` is encoded; this rank: a chunk for all. Allocated on first
  /// use.
  std::byte* staging(int peer, uint64_t chunk);
  Counters& at(Stream stream, int peer) {
    return counters_[size_t(stream) * size_t(layout.ranks) + size_t(peer)];
  }

  const WorkspaceLayout layout;
  const std::shared_ptr<SymmetricBuffer> buffer;
  const Reach reach;
  const std::vector<CallCard*> cards;
  const Raise raise;
  int call_depth = 0;           ///< nesting depth of CallOnCard
  uint64_t operators = 0;       ///< operators created so far
  uint64_t operator_calls = 0;  ///< operator calls so far
  Progress progress;            ///< guards all calls
  uint64_t calls = 0;           ///< collective calls so far
  uint64_t bytes_sent = 0;  ///< sent by them and overlap operators, excluding arguments and signals
  /// Algorithms that the tuner chose for uncompressed collectives, by request; equal on every rank.
  std::map<std::string, uint8_t> routes;
  /// Envelopes to send: [call parity][peer]. Untouched pages take no memory.
  const std::unique_ptr<std::byte[]> outgoing;

 private:
  std::vector<Counters> counters_;
  std::unique_ptr<std::byte[]> staging_;
};

}  // namespace tandem
