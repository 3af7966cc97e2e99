#include "engine/data/text/text_file.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "core/system/files.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kTextBlock = size_t(1) << 20;

int64_t nanoseconds(const timespec& time) {
  return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

TextFile::TextFile(FileDescriptor file, std::string path)
    : file_(std::move(file)),
      path_(std::move(path)),
      stamp_(stamp()),
      size_(uint64_t(stamp_.size)) {}

std::string TextFile::identity() const {
  struct stat status {};
  if (::fstat(file_.get(), &status) != 0) throw_errno(path_, "cannot look at it");
  return fmt::format("{}:{}:{} ", uint64_t(status.st_dev), uint64_t(status.st_ino), size_);
}

TextFile::Stamp TextFile::stamp() const {
  struct stat status {};
  if (::fstat(file_.get(), &status) != 0) throw_errno(path_, "cannot look at it");
  return {int64_t(status.st_size), nanoseconds(status.st_mtim), nanoseconds(status.st_ctim)};
}

uint64_t TextFile::hash_now(const std::function<void(size_t bytes)>& advanced) const {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       XXH3_freeState);
  if (!state) throw std::bad_alloc();
  XXH3_64bits_reset(state.get());
  std::vector<std::byte> block(kTextBlock);
  for (uint64_t offset = 0; offset < size_;) {
    const size_t wanted = size_t(std::min<uint64_t>(block.size(), size_ - offset));
    const size_t got = read_at(file_.get(), path_, block.data(), wanted, offset);
    if (got < wanted) fail();
    XXH3_64bits_update(state.get(), block.data(), got);
    offset += got;
    advanced(got);
  }
  return XXH3_64bits_digest(state.get());
}

void TextFile::fail() const {
  const Stamp now = stamp();
  const std::string found =
      now.size == int64_t(size_) ? "other bytes" : fmt::format("{} bytes", now.size);
  throw IoError(
      fmt::format("{}: changed while it is trained on: holds {}: expected the {} bytes "
                  "that it had",
                  path_, found, size_));
}

void TextFile::read(uint64_t offset, std::span<std::byte> out) const {
  if (read_at(file_.get(), path_, out.data(), out.size(), offset) < out.size()) fail();
  const std::lock_guard lock(mutex_);
  const Stamp now = stamp();  // taken after reading the bytes
  if (now == stamp_) return;
  if (now.size != stamp_.size || hash_now([](size_t) {}) != hash_) fail();
  stamp_ = now;
}

void TextFile::verify(uint64_t hash) const {
  if (stamp().size != int64_t(size_) || hash != hash_) fail();
}

}  // namespace tandem
