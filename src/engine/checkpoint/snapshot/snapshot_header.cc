#include "engine/checkpoint/snapshot/snapshot_header.h"

#include <atomic>
#include <cstring>
#include <span>
#include <string_view>

#include "core/system/files.h"

namespace tandem {
namespace {

constexpr char kMagic[8] = {'t', 'a', 'n', 'd', 'e', 'm', 's', '2'};
constexpr size_t kPage = 4096;

size_t round_to_page(size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

std::string hash_of_fields(const SnapshotHeader& header) {
  return content_hash(std::as_bytes(std::span(&header, 1)).first(offsetof(SnapshotHeader, hash)));
}

}  // namespace

bool SnapshotHeader::is_valid() const {
  return std::memcmp(magic, kMagic, sizeof kMagic) == 0 &&
         hash_of_fields(*this) == std::string_view(hash, kHashDigits);
}

void SnapshotHeader::invalidate() {
  std::memset(hash, 0, sizeof hash);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void SnapshotHeader::complete() {
  std::memcpy(magic, kMagic, sizeof kMagic);
  const std::string found = hash_of_fields(*this);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  found.copy(hash, kHashDigits);
}

std::string SnapshotHeader::state_text() const {
  return {reinterpret_cast<const char*>(this + 1), state_bytes};
}

size_t SnapshotShape::values_at() const {
  return round_to_page(sizeof(SnapshotHeader) + state_room);
}

size_t SnapshotShape::generation_bytes() const {
  return values_at() + round_to_page(value_bytes);
}

}  // namespace tandem
