// The symmetric memory and the epochs through which the plain collectives stage their chunks.
//
// A stream carries chunks from one rank to another, in order, through `slots` slots of
// `slot_bytes` in the receiver's memory. Chunk c may be put once chunk c - slots was acknowledged.
// Counters never go back, so a stream is reused for ever without a barrier. Three streams per pair
// keep traffic apart that could otherwise wait for itself: contributions to a sum, results, and
// send/recv. A call's arguments, and payloads small enough, travel in an envelope of their own
// beside the first chunk (two per pair, alternating).
//
// Where all ranks share one address space, tensors past that size are not staged at all: see
// collectives/direct.h, which needs a gate of one word and a signal that says who is done.
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
  size_t slot_bytes;      ///< payload of one chunk at most
  size_t envelope_bytes;  ///< one envelope at most, its header included: 4 KiB + 32 B a rank

  static WorkspaceLayout of(int ranks);

  size_t envelope_at(int source, uint64_t call) const;
  size_t slot_at(Stream stream, int source, uint64_t chunk) const;
  size_t pair_header_at(int source, uint64_t chunk) const;
  size_t gate_at() const;
  size_t card_at() const;
  size_t bytes() const;

  /// Payload of an envelope at most.
  size_t small() const { return envelope_bytes - kEnvelopeHeader; }

  int arrived(Stream stream, int source) const;  ///< signal: chunks that arrived from source
  int freed(Stream stream, int peer) const;      ///< signal: chunks that peer has read
  int envelope(int source) const;                ///< signal: envelopes that arrived from source
  int done(int source) const;                    ///< signal: calls that source has finished with
  int begun(int source) const;                   ///< signal: operators' calls that source has begun
  int signals() const;
};

/// How ranks reach each other's memory.
enum class Reach : uint8_t {
  no_addresses,    ///< of another process
  addresses_only,  ///< of this process, but an emulated link lies between
  direct,          ///< any memory of a rank, the caller's too, by loads and stores
};

class Workspace {
 public:
  /// Raises `peer`'s `signal` to `epoch`.
  using Raise = std::function<void(int peer, int signal, uint64_t epoch)>;
  /// `cards`: by rank, nullptr where memory is not shared. `raise`: at once, on no emulated link.
  Workspace(Communicator& comm, const WorkspaceLayout& layout_,
            std::shared_ptr<SymmetricBuffer> buffer_, Reach reach_, std::vector<CallCard*> cards_,
            Raise raise_);

  struct Counters {
    uint64_t sent = 0, received = 0;
  };
  /// Where a chunk is encoded that goes to `peer`; this rank: to all. Allocated when first used.
  std::byte* staging(int peer, uint64_t chunk);
  Counters& at(Stream stream, int peer) {
    return counters_[size_t(stream) * size_t(layout.ranks) + size_t(peer)];
  }

  const WorkspaceLayout layout;
  const std::shared_ptr<SymmetricBuffer> buffer;
  const Reach reach;
  const std::vector<CallCard*> cards;
  const Raise raise;
  int call_depth = 0;           ///< of CallOnCard
  uint64_t operators = 0;       ///< made so far
  uint64_t operator_calls = 0;  ///< so far
  Progress progress;            ///< of all calls
  uint64_t calls = 0;           ///< collective calls so far
  uint64_t bytes_sent = 0;      ///< by them and overlap operators, without arguments and signals
  /// What the tuner chose for plain collectives, by what it was asked; the same on every rank.
  std::map<std::string, uint8_t> routes;
  std::vector<std::byte> outgoing;  ///< envelopes as they leave: [call parity][peer]

 private:
  std::vector<Counters> counters_;
  std::unique_ptr<std::byte[]> staging_;
};

}  // namespace tandem
