#include "engine/checkpoint/snapshot/snapshot_area.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "comm/processes/shared/snapshot_memory_file.h"
#include "core/system/files.h"
#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr char kAreaMagic[8] = {'t', 'a', 'n', 'd', 'e', 'm', 'a', '1'};
static_assert(2 * kAreaRange == processes::kSnapshotRange);
constexpr size_t kAreaPage = 4096, kRunRoom = 64, kLayoutRoom = 2048;

/// Text that fits a field: longer ones are told apart by their hash.
std::string fitting(const std::string& text, size_t room) {
  return text.size() < room ? text : content_hash(text);
}

}  // namespace

struct SnapshotArea::FirstPage {
  char magic[8];
  char run[kRunRoom], layout[kLayoutRoom];  // with a zero at the end
  int32_t rank, ranks;
  SnapshotShape shape;
  char hash[kHashDigits];  // of the above

  std::string found_hash() const {
    return content_hash(std::as_bytes(std::span(this, 1)).first(offsetof(FirstPage, hash)));
  }
};

SnapshotArea::SnapshotArea(int fd, uint64_t offset) : fd_(fd), offset_(offset) {
  static_assert(sizeof(FirstPage) <= kAreaPage);
  if (fd_ < 0) return;
  page_ = processes::SharedMemory::map(fd_, offset_, kAreaPage);
  if (has_owner()) map_generations();
}

SnapshotArea::FirstPage* SnapshotArea::first_page() const {
  return reinterpret_cast<FirstPage*>(page_->data());
}

void SnapshotArea::map_generations() {
  const size_t bytes = size_t(shape().generations) * shape().generation_bytes();
  generations_ = fd_ < 0 ? processes::SharedMemory::create(bytes)
                         : processes::SharedMemory::map(fd_, offset_ + kAreaPage, bytes);
}

bool SnapshotArea::has_owner() const {
  return page_ && std::memcmp(first_page()->magic, kAreaMagic, sizeof kAreaMagic) == 0 &&
         first_page()->found_hash() == std::string_view(first_page()->hash, kHashDigits);
}

int SnapshotArea::rank() const {
  return first_page()->rank;
}

int SnapshotArea::ranks() const {
  return first_page()->ranks;
}

const SnapshotShape& SnapshotArea::shape() const {
  return first_page()->shape;
}

std::string SnapshotArea::differs(const SnapshotOwner& owner) const {
  const FirstPage& found = *first_page();
  if (found.run != fitting(owner.run, kRunRoom)) {
    return fmt::format("they are of run {}: expected {}", printable(found.run), owner.run);
  }
  if (found.layout != fitting(owner.layout, kLayoutRoom) || found.ranks != owner.ranks) {
    return fmt::format("they are of {} on {} ranks: expected {} on {}", printable(found.layout),
                       found.ranks, owner.layout, owner.ranks);
  }
  if (found.rank != owner.rank) {
    return fmt::format("they are of rank {}: expected {}", found.rank, owner.rank);
  }
  return "";
}

void SnapshotArea::reset(const SnapshotOwner& owner, const SnapshotShape& shape) {
  generations_.reset();
  if (fd_ < 0) {
    page_ = processes::SharedMemory::create(kAreaPage);
  } else {
    std::memset(page_->data(), 0, kAreaPage);
    const int punch = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    if (::fallocate(fd_, punch, off_t(offset_), off_t(kAreaRange)) != 0) {
      throw_errno("memory for snapshots", "cannot be erased");
    }
  }
  FirstPage& page = *first_page();
  std::memcpy(page.magic, kAreaMagic, sizeof kAreaMagic);
  fitting(owner.run, kRunRoom).copy(page.run, kRunRoom - 1);
  fitting(owner.layout, kLayoutRoom).copy(page.layout, kLayoutRoom - 1);
  page.rank = owner.rank;
  page.ranks = owner.ranks;
  page.shape = shape;
  map_generations();
  std::memset(generations_->data(), 0, generations_->bytes());  // the first copy waits for no pages
  page.found_hash().copy(page.hash, kHashDigits);
}

std::byte* SnapshotArea::generation(int index) const {
  return generations_->data() + size_t(index) * shape().generation_bytes();
}

int SnapshotArea::oldest(std::span<const int> in_use) const {
  int found = -1;
  int64_t found_step = 0;
  for (int index = 0; index < shape().generations; ++index) {
    if (std::ranges::find(in_use, index) != in_use.end()) continue;
    const int64_t step = header(index).is_valid() ? header(index).step : -1;
    if (found >= 0 && step >= found_step) continue;
    found = index;
    found_step = step;
  }
  return found;
}

size_t SnapshotArea::bytes() const {
  return generations_ ? kAreaPage + generations_->bytes() : 0;
}

}  // namespace tandem
