#include "comm/rendezvous/message.h"

#include <fmt/format.h>

#include <cstring>

#include "tandem/error.h"

namespace tandem::control {

void require_lengths(std::string_view what, size_t name_bytes, size_t blob_bytes) {
  if (name_bytes <= kMaxNameBytes && blob_bytes <= kMaxBlobBytes) return;
  throw InvalidArgument(fmt::format("{} of {} bytes, its name of {}: expected at most {} and {}",
                                    what, blob_bytes, name_bytes, kMaxBlobBytes, kMaxNameBytes));
}

void Inbox::append(std::span<const std::byte> bytes) {
  if (damaged_) return;
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  look_at_first();
}

void Inbox::look_at_first() {
  if (bytes_.size() < sizeof first_) return;
  std::memcpy(&first_, bytes_.data(), sizeof first_);
  damaged_ = uint32_t(first_.kind) > uint32_t(kLastKind) || first_.name_bytes > kMaxNameBytes ||
             first_.blob_bytes > kMaxBlobBytes;
}

const Header* Inbox::front() const {
  if (damaged_ || bytes_.size() < sizeof first_) return nullptr;
  return bytes_.size() >= first_bytes() ? &first_ : nullptr;
}

size_t Inbox::first_bytes() const {
  return sizeof first_ + first_.name_bytes + first_.blob_bytes;
}

bool Inbox::take(Message& message) {
  if (!front()) return false;
  const auto begin = bytes_.begin() + int64_t(sizeof first_);
  const auto end = bytes_.begin() + int64_t(first_bytes());
  message.header = first_;
  message.payload.assign(begin, end);
  bytes_.erase(bytes_.begin(), end);
  look_at_first();
  return true;
}

}  // namespace tandem::control
