// Messages of the rendezvous store, in the format of message.h. A request's `value` is its number,
// which the reply repeats.
//
//   set    key, value. `rank`: seconds of its lease; 0: forever. A leased key is removed when its
//          lease passes without another `set`, or when the client that set it leaves or is lost.
//   get    keys, one a line -> reply: a blob a key, empty if there is none. `rank` 1: replied to
//          once all keys exist
//   add    key, int64 -> reply: the sum so far, int64
//   watch  family: the text of a key up to its first '/', inclusive. Removals of its keys arrive as
//          events from then on. `rank` 1: settings, too
//   meet   key, MeetHeader, compared text, blob -> met, once `count` members have come: one
//          message for all, so that a barrier costs each member one message in each direction
//   overdue  a meeting's key -> reply: numbers of the members that are missing, int32
//   bye    the client leaves
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/rendezvous/message.h"

namespace tandem::control {

using Blob = std::vector<std::byte>;

/// Why a run of the world, or its start, has ended: the value of a key abort/RUN.
struct AbortNotice {
  int origin;  ///< rank that caused it
  std::string reason;
};
/// Key of the notice of a rank that fails while a world is formed.
constexpr std::string_view kStartFailure = "abort/0";
Blob make_abort_value(int origin, std::string_view reason);
/// Nothing for bytes that are no notice.
std::optional<AbortNotice> read_abort_value(std::span<const std::byte> value);

struct MeetHeader {
  uint32_t count;           ///< members
  uint32_t index;           ///< of this one
  uint32_t compared_bytes;  ///< bytes of the text that must be equal
  uint32_t gone_count;      ///< 1: clients that have left or are lost count as arrived
};

/// Result of a meeting.
struct Met {
  int differs = -1;          ///< first member whose text is not that of member 0; -1: all are equal
  std::string first, other;  ///< the two texts, if they differ
  std::vector<Blob> blobs;   ///< by member; none if all are empty
};

enum class Change : uint8_t { set, left, lost, expired };
struct Event {
  Change change;
  std::string key;
  Blob value;  ///< last value if the key was removed
};

std::string_view key_of(const Message& message);
std::span<const std::byte> blob_of(const Message& message);
/// Text of a key up to its first '/', inclusive; all of it without one.
std::string_view family_of(std::string_view key);
/// Number after a key's first '/'; 0 if there is none.
uint64_t number_of_key(std::string_view key);
/// Number of the reply to all members of a meeting; no request's.
uint64_t number_of_meeting(std::string_view key);

void append_blob(Blob& to, std::span<const std::byte> blob);
/// Blobs that were appended. Throws IoError for bytes that are not.
std::vector<Blob> split_blobs(std::span<const std::byte> bytes);
void append_event(Blob& to, const Event& event);
std::vector<Event> split_events(std::span<const std::byte> bytes);

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
inline std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace tandem::control
