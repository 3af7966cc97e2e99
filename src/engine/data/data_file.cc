#include "engine/data/data_file.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <memory>
#include <new>

#include "core/system/files.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr uint64_t kWholeBelow = uint64_t(16) << 20;
constexpr uint64_t kSampledBlock = uint64_t(64) << 10, kSampledBlocks = 32;
constexpr uint64_t kVisitedBlock = uint64_t(1) << 20;

}  // namespace

bool is_sampled(uint64_t size) {
  return size > kWholeBelow;
}

std::vector<FileRange> sampled_ranges(uint64_t size) {
  if (!is_sampled(size)) return {{0, size}};
  std::vector<FileRange> ranges;
  const uint64_t last = size - kSampledBlock;
  for (uint64_t i = 0; i + 1 < kSampledBlocks; ++i) {
    const auto begin = uint64_t(__int128(last) * i / (kSampledBlocks - 1));
    ranges.push_back({begin / 64 * 64, kSampledBlock});
  }
  ranges.push_back({last, kSampledBlock});
  return ranges;
}

size_t max_open_files() {
  struct rlimit limit {};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? size_t(limit.rlim_cur / 2) : 0;
}

DataFile::DataFile(const std::string& path, bool stays_open, Content content) : path_(path) {
  FileDescriptor file = open_for_reading(path);
  stamp_ = stamp(file.get());
  if (content == Content::unpacked) {
    char first[4] = {};
    const size_t got = read_at(file.get(), path, first, sizeof first, 0);
    compression_ = find_compression({first, got});
  }
  const bool is_packed = compression_ != Compression::none;
  if (stays_open || is_packed) file_.emplace(std::move(file));
  if (!is_packed) return;
  unpacked_ = std::make_unique<Unpacked>(
      PackedFile{path, compression_, stamp_.size,
                 [this](uint64_t offset, std::span<std::byte> out) { read_stored(offset, out); }});
}

uint64_t DataFile::reach(uint64_t end) const {
  return unpacked_ ? unpacked_->reach(end) : std::min(end, stamp_.size);
}

void DataFile::adopt(const Unpacked::Handle& handle) {
  unpacked_ = std::make_unique<Unpacked>(path_, handle);
}

std::string DataFile::identity() const {
  return fmt::format("{}:{}:{} ", stamp_.device, stamp_.inode, stamp_.size);
}

DataFile::Stamp DataFile::stamp(int fd) const {
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw_errno(path_, "cannot look at it");
  return {uint64_t(status.st_dev), uint64_t(status.st_ino), uint64_t(status.st_size),
          int64_t(status.st_mtim.tv_sec) * 1'000'000'000 + status.st_mtim.tv_nsec};
}

template <typename Use>
void DataFile::with_descriptor(const Use& use) const {
  if (file_) return use(file_->get());
  const FileDescriptor file = open_for_reading(path_);
  use(file.get());
}

uint64_t DataFile::hash_samples(
    uint64_t size, const std::function<void(uint64_t offset, std::span<std::byte>)>& read,
    const Visit& visit) const {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       XXH3_freeState);
  if (!state) throw std::bad_alloc();
  XXH3_64bits_reset(state.get());
  std::vector<std::byte> block(std::min(kVisitedBlock, size));
  for (const FileRange& range : sampled_ranges(size)) {
    for (uint64_t done = 0; done < range.size;) {
      const size_t wanted = size_t(std::min<uint64_t>(block.size(), range.size - done));
      const uint64_t offset = range.begin + done;
      const std::span<std::byte> bytes = std::span(block).first(wanted);
      read(offset, bytes);
      XXH3_64bits_update(state.get(), bytes.data(), bytes.size());
      if (visit) visit(offset, bytes);
      done += wanted;
    }
  }
  return XXH3_64bits_digest(state.get());
}

uint64_t DataFile::hash_now(int fd, const Visit& visit) const {
  return hash_samples(
      stamp_.size,
      [&](uint64_t offset, std::span<std::byte> out) {
        if (read_at(fd, path_, out.data(), out.size(), offset) < out.size()) fail(fd);
      },
      visit);
}

uint64_t DataFile::content_hash() const {
  if (!unpacked_) return hash_;
  return hash_samples(
      size(), [&](uint64_t offset, std::span<std::byte> out) { unpacked_->read(offset, out); },
      nullptr);
}

int64_t DataFile::modified_ns() const {
  const std::lock_guard lock(mutex_);
  return stamp_.modified_ns;
}

void DataFile::fail(int fd) const {
  const Stamp now = stamp(fd);
  const std::string found =
      now.size == stamp_.size ? "other bytes" : fmt::format("{} bytes", now.size);
  throw IoError(
      fmt::format("{}: changed while it is trained on: holds {}: expected the {} bytes "
                  "that it had",
                  path_, found, stamp_.size));
}

/// Must follow the read that it checks.
void DataFile::check(int fd) const {
  const std::lock_guard lock(mutex_);
  const Stamp now = stamp(fd);
  if (now == stamp_) return;
  const bool replaced = now.device != stamp_.device || now.inode != stamp_.inode;
  if (replaced || now.size != stamp_.size || is_sampled(now.size) || hash_now(fd, nullptr) != hash_)
    fail(fd);
  stamp_ = now;
}

void DataFile::read(uint64_t offset, std::span<std::byte> out) const {
  if (!unpacked_) return read_stored(offset, out);
  if (reach(offset + out.size()) < offset + out.size()) fail(file_->get());
  unpacked_->read(offset, out);
}

void DataFile::read_stored(uint64_t offset, std::span<std::byte> out) const {
  with_descriptor([&](int fd) {
    if (read_at(fd, path_, out.data(), out.size(), offset) < out.size()) fail(fd);
    check(fd);
  });
}

void DataFile::sample(const Visit& visit) {
  with_descriptor([&](int fd) { hash_ = hash_now(fd, visit); });
}

void DataFile::verify() const {
  with_descriptor([&](int fd) {
    check(fd);
    if (hash_now(fd, nullptr) != hash_) fail(fd);
  });
}

std::string read_content(const std::string& path) {
  const DataFile file(path, true, Content::unpacked);
  std::string text;
  try {
    text.resize(size_t(file.size()));
  } catch (const std::exception&) {
    throw IoError(fmt::format("{}: no memory for its {} bytes", path, file.size()));
  }
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace tandem
