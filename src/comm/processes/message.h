// Message format between the communication threads of two processes: a Header, then the contents.
// With MPI that is one message of at most kMessageBytes; larger contents follow as a second one
// (tag kPayloadTag) that is received directly at its destination.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::processes {

enum class MessageKind : uint32_t {
  put,    ///< contents go to [offset, offset + bytes) of a buffer; then signal is raised to epoch
  leave,  ///< sockets only: the sender will send no more messages
  taken,  ///< sockets only: the oldest zero-copy contents (is_zero_copy) have been copied to their
          ///< destination
};

struct Header {
  MessageKind kind;
  int32_t signal;
  uint64_t communicator;
  uint64_t buffer;
  uint64_t offset;
  uint64_t bytes;
  uint64_t epoch;
  uint64_t hash = 0;         ///< put, if messages are checked: of the contents, not 0
  uint64_t header_hash = 0;  ///< of the fields before it
};
/// Completes a header that is about to be sent.
void seal(Header& header);
/// Whether a received header is as it was sealed. Nothing is written where another one says.
bool is_sealed(const Header& header);

/// Min size of a put's contents that sockets send zero-copy: their pages go to the system and must
/// not change before the receiver reports that it has copied them out.
constexpr size_t kZeroCopyBytes = size_t(64) << 10;
inline bool is_zero_copy(const Header& header) {
  return header.kind == MessageKind::put && header.bytes >= kZeroCopyBytes;
}

/// Max size of a message: below the eager limit of Open MPI's shared-memory path.
constexpr size_t kMessageBytes = 4000;
constexpr size_t kInlineBytes = kMessageBytes - sizeof(Header);
/// Longer contents are sent as several MPI messages. Open MPI's TCP path restricts a connection to
/// one direction at a time while it negotiates a message; up to this size it is told not to
/// negotiate.
constexpr size_t kChunkBytes = size_t(256) << 10;
constexpr int kHeaderTag = 1, kPayloadTag = 2;

}  // namespace tandem::processes
