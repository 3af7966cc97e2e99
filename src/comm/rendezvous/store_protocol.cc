#include "comm/rendezvous/store_protocol.h"

#include <charconv>
#include <cstring>

#include "tandem/error.h"

namespace tandem::control {

std::string_view key_of(const Message& message) {
  return text_of(std::span(message.payload).first(message.header.name_bytes));
}

std::span<const std::byte> blob_of(const Message& message) {
  return std::span(message.payload).subspan(message.header.name_bytes);
}

std::string_view family_of(std::string_view key) {
  const size_t slash = key.find('/');
  return key.substr(0, slash == key.npos ? key.npos : slash + 1);
}

uint64_t number_of_key(std::string_view key) {
  uint64_t number = 0;
  const size_t begin = family_of(key).size();
  std::from_chars(key.data() + begin, key.data() + key.size(), number);
  return number;
}

uint64_t number_of_meeting(std::string_view key) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : key) hash = (hash ^ uint8_t(c)) * 1099511628211u;
  return hash | uint64_t{1} << 63;
}

Blob make_abort_value(int origin, std::string_view reason) {
  Blob value;
  for (const auto bytes : {std::as_bytes(std::span(&origin, 1)), bytes_of(reason)}) {
    value.insert(value.end(), bytes.begin(), bytes.end());
  }
  return value;
}

std::optional<AbortNotice> read_abort_value(std::span<const std::byte> value) {
  AbortNotice notice{};
  if (value.size() < sizeof notice.origin) return std::nullopt;
  std::memcpy(&notice.origin, value.data(), sizeof notice.origin);
  notice.reason = text_of(value.subspan(sizeof notice.origin));
  return notice;
}

void append_blob(Blob& to, std::span<const std::byte> blob) {
  const uint32_t bytes = uint32_t(blob.size());
  const auto length = std::as_bytes(std::span(&bytes, 1));
  to.insert(to.end(), length.begin(), length.end());
  to.insert(to.end(), blob.begin(), blob.end());
}

std::vector<Blob> split_blobs(std::span<const std::byte> bytes) {
  std::vector<Blob> blobs;
  while (!bytes.empty()) {
    uint32_t length = 0;
    if (bytes.size() >= sizeof length) std::memcpy(&length, bytes.data(), sizeof length);
    if (bytes.size() < sizeof length + length) {
      throw IoError("store: a reply that ends within a blob: expected the same version of Tandem");
    }
    const auto blob = bytes.subspan(sizeof length, length);
    blobs.emplace_back(blob.begin(), blob.end());
    bytes = bytes.subspan(sizeof length + length);
  }
  return blobs;
}

void append_event(Blob& to, const Event& event) {
  const auto change = std::as_bytes(std::span(&event.change, 1));
  append_blob(to, change);
  append_blob(to, bytes_of(event.key));
  append_blob(to, event.value);
}

std::vector<Event> split_events(std::span<const std::byte> bytes) {
  std::vector<Event> events;
  const auto blobs = split_blobs(bytes);
  for (size_t i = 0; i + 2 < blobs.size(); i += 3) {
    if (blobs[i].size() != 1) continue;
    events.push_back(
        {Change(uint8_t(blobs[i][0])), std::string(text_of(blobs[i + 1])), blobs[i + 2]});
  }
  return events;
}

}  // namespace tandem::control
