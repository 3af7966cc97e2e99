#include "engine/data/text/unpacked.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "core/system/files.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kPackedBlock = size_t(256) << 10, kUnpackedBlock = size_t(1) << 20;
constexpr uint64_t kRoomShare = 8;  // of the content must stay free

/// Sequential reading of a compressed file.
class PackedBytes {
 public:
  explicit PackedBytes(PackedFile file)
      : file_(std::move(file)), block_(size_t(std::min<uint64_t>(kPackedBlock, file_.bytes))) {}
  /// Bytes that were read and not used; empty at the end of the file.
  std::span<const std::byte> next() {
    if (rest_.empty() && offset_ < file_.bytes) {
      const auto size = size_t(std::min<uint64_t>(block_.size(), file_.bytes - offset_));
      file_.read(offset_, std::span(block_).first(size));
      rest_ = std::span(block_).first(size);
      offset_ += size;
    }
    return rest_;
  }
  void use(size_t bytes) { rest_ = rest_.subspan(bytes); }
  uint64_t offset() const { return offset_ - rest_.size(); }
  [[noreturn]] void fail(std::string_view found) const {
    throw IoError(fmt::format("{}: damaged {} file: byte {}: {}", file_.path,
                              file_.compression == Compression::gzip ? "gzip" : "zstd", offset(),
                              found));
  }
  [[noreturn]] void fail_at_end() const {
    fail("the file ends within compressed data: expected the rest of them");
  }

 private:
  PackedFile file_;
  std::vector<std::byte> block_;
  std::span<const std::byte> rest_;
  uint64_t offset_ = 0;  // of the end of rest_
};

/// Members one after the other, and zeros after the last one, as gzip reads them.
class GzipUnpacker : public Unpacker {
 public:
  explicit GzipUnpacker(PackedFile file) : packed_(std::move(file)) {
    constexpr int kGzip = 16 + MAX_WBITS;
    if (::inflateInit2(&stream_, kGzip) != Z_OK) throw std::bad_alloc();
  }
  ~GzipUnpacker() override { ::inflateEnd(&stream_); }
  GzipUnpacker(const GzipUnpacker&) = delete;
  GzipUnpacker& operator=(const GzipUnpacker&) = delete;

  size_t read(std::span<std::byte> out) override {
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = uInt(out.size());
    while (stream_.avail_out > 0 && begin_member()) inflate();
    return out.size() - stream_.avail_out;
  }

 private:
  /// Whether there is compressed data left.
  bool begin_member() {
    if (in_member_) return true;
    std::span<const std::byte> rest = packed_.next();
    if (rest.empty()) return false;
    if (members_ > 0 && rest[0] == std::byte(0)) return skip_zeros();
    if (members_ > 0 && rest[0] != std::byte(0x1f)) {
      packed_.fail("bytes after the end of the compressed data: expected none");
    }
    if (members_++ > 0 && ::inflateReset(&stream_) != Z_OK) throw std::bad_alloc();
    return in_member_ = true;
  }
  bool skip_zeros() {
    for (auto rest = packed_.next(); !rest.empty(); rest = packed_.next()) {
      if (rest[0] != std::byte(0)) {
        packed_.fail("bytes after the end of the compressed data: expected none");
      }
      packed_.use(1);
    }
    return false;
  }
  void inflate() {
    const std::span<const std::byte> rest = packed_.next();
    if (rest.empty()) packed_.fail_at_end();
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(rest.data()));
    stream_.avail_in = uInt(rest.size());
    const int status = ::inflate(&stream_, Z_NO_FLUSH);
    packed_.use(rest.size() - stream_.avail_in);
    if (status == Z_MEM_ERROR) throw std::bad_alloc();
    if (status == Z_STREAM_END) in_member_ = false;
    if (status == Z_OK || status == Z_STREAM_END || status == Z_BUF_ERROR) return;
    packed_.fail(stream_.msg ? stream_.msg : "not compressed data");
  }

  PackedBytes packed_;
  z_stream stream_{};
  bool in_member_ = false;
  int64_t members_ = 0;
};

class ZstdUnpacker : public Unpacker {
 public:
  explicit ZstdUnpacker(PackedFile file)
      : packed_(std::move(file)), stream_(::ZSTD_createDStream(), ::ZSTD_freeDStream) {
    if (!stream_) throw std::bad_alloc();
  }

  size_t read(std::span<std::byte> out) override {
    ZSTD_outBuffer to{out.data(), out.size(), 0};
    while (to.pos < to.size) {
      const std::span<const std::byte> rest = packed_.next();
      if (rest.empty() && !in_frame_) break;
      ZSTD_inBuffer from{rest.data(), rest.size(), 0};
      const size_t before = to.pos;
      const size_t status = ::ZSTD_decompressStream(stream_.get(), &to, &from);
      packed_.use(from.pos);
      if (::ZSTD_isError(status)) packed_.fail(::ZSTD_getErrorName(status));
      in_frame_ = status != 0;
      if (rest.empty() && in_frame_ && to.pos == before) packed_.fail_at_end();
    }
    return to.pos;
  }

 private:
  PackedBytes packed_;
  std::unique_ptr<ZSTD_DStream, decltype(&::ZSTD_freeDStream)> stream_;
  bool in_frame_ = false;
};

std::string temporary_folder() {
  const char* const given = std::getenv("TMPDIR");
  if (given && *given) return given;
  return path_exists("/var/tmp") ? "/var/tmp" : "/tmp";
}

/// A new file in `folder` that no name leads to.
FileDescriptor create_unnamed(const std::string& folder) {
  const int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0) return FileDescriptor(fd);
  std::string name = folder + "/tandem-XXXXXX";  // where the file system has no O_TMPFILE
  FileDescriptor named(::mkostemp(name.data(), O_CLOEXEC));
  if (named.get() < 0) throw_errno(folder, "cannot create a file for unpacked data (TMPDIR)");
  ::unlink(name.c_str());
  return named;
}

}  // namespace

Compression find_compression(std::string_view first) {
  if (first.starts_with("\x1f\x8b")) return Compression::gzip;
  if (first.starts_with("\x28\xb5\x2f\xfd")) return Compression::zstd;
  const bool is_skipped = first.size() >= 4 && (uint8_t(first[0]) & 0xf0) == 0x50 &&
                          first.substr(1, 3) == "\x2a\x4d\x18";
  return is_skipped ? Compression::zstd : Compression::none;
}

std::unique_ptr<Unpacker> open_unpacker(PackedFile file) {
  if (file.compression == Compression::gzip) return std::make_unique<GzipUnpacker>(std::move(file));
  return std::make_unique<ZstdUnpacker>(std::move(file));
}

Unpacked::Unpacked(PackedFile file)
    : path_(file.path),
      folder_(temporary_folder()),
      store_(create_unnamed(folder_)),
      packed_(std::move(file)) {}

Unpacked::Unpacked(const std::string& path, const Handle& handle)
    : path_(path),
      store_(fmt::format("/proc/{}/fd/{}", handle.process, handle.fd), O_RDONLY | O_CLOEXEC),
      bytes_(handle.bytes) {
  const uint64_t found = file_size(store_.get(), path);
  if (found == handle.bytes) return;
  throw IoError(fmt::format("{}: unpacked by another process to {} bytes: expected {}", path, found,
                            handle.bytes));
}

/// Content that grows without end must not take all the room that other programs have.
void Unpacked::check_room() const {
  const auto room = free_bytes(folder_);
  if (!room || *room >= bytes_ / kRoomShare) return;
  throw IoError(
      fmt::format("{}: unpacks to more than {} bytes, and {} has room for {} more: expected an "
                  "eighth of them to stay free (TMPDIR names another folder)",
                  path_, bytes_, folder_, *room));
}

uint64_t Unpacked::reach(uint64_t end) {
  const std::lock_guard lock(mutex_);
  if (packed_ && bytes_ < end) {
    unpacker_ = open_unpacker(std::move(*packed_));
    packed_.reset();
  }
  std::vector<std::byte> block(unpacker_ && bytes_ < end ? kUnpackedBlock : 0);
  while (unpacker_ && bytes_ < end) {
    const size_t size = unpacker_->read(block);
    write_at(store_.get(), folder_ + ": unpacked " + path_, block.data(), size, bytes_);
    bytes_ += size;
    if (size < block.size()) unpacker_.reset();
    check_room();
  }
  return std::min(end, bytes_);
}

void Unpacked::read(uint64_t offset, std::span<std::byte> out) const {
  if (read_at(store_.get(), path_, out.data(), out.size(), offset) < out.size()) {
    throw IoError(path_ + ": its unpacked content was cut: expected no other program to do so");
  }
}

Unpacked::Handle Unpacked::handle() {
  const uint64_t bytes = reach(UINT64_MAX);
  return {int64_t(::getpid()), store_.get(), bytes};
}

FileDescriptor Unpacked::duplicate() {
  reach(UINT64_MAX);
  const int fd = ::fcntl(store_.get(), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) throw_errno(path_, "cannot open its unpacked content again");
  return FileDescriptor(fd);
}

}  // namespace tandem
