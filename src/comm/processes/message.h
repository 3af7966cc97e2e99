// What the communication threads of two processes say to each other: a Header, then the contents.
// As MPI messages that is one of at most kMessageBytes; larger contents follow as a second one (tag
// kPayloadTag) that is received straight to its final place.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::processes {

enum class MessageKind : uint32_t {
  put,    ///< contents go to [offset, offset + bytes) of a buffer; then signal is raised to epoch
  blob,   ///< one rank's part of an exchange; epoch is the exchange's number
  abort,  ///< contents are the reason; communicator is the run, signal the rank that is the cause
  ended,  ///< the sender has ended its run, whose number communicator is
  leave,  ///< the sender will send nothing more
  taken,  ///< sockets only: the oldest lent contents (is_lent) have reached their place
};

struct Header {
  MessageKind kind;
  int32_t signal;
  uint64_t communicator;
  uint64_t buffer;
  uint64_t offset;
  uint64_t bytes;
  uint64_t epoch;
};

/// Over sockets, large contents of a put are lent to the system, not copied into it: their pages
/// travel, and must not change before the receiver says that it has copied them out.
constexpr size_t kLentBytes = size_t(64) << 10;
inline bool is_lent(const Header& header) {
  return header.kind == MessageKind::put && header.bytes >= kLentBytes;
}

/// Below the eager limit of Open MPI's shared-memory path.
constexpr size_t kMessageBytes = 4000;
constexpr size_t kInlineBytes = kMessageBytes - sizeof(Header);
/// Longer contents go as several MPI messages. Open MPI's TCP path holds a connection to one
/// direction at a time while it negotiates a message; up to this size it is told not to negotiate.
constexpr size_t kPieceBytes = size_t(256) << 10;
constexpr int kHeaderTag = 1, kPayloadTag = 2;

}  // namespace tandem::processes
