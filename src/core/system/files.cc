#include "core/system/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fnmatch.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <utility>

#include "core/system/process/file_limit.h"
#include "core/system/write_fault.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kBlock = size_t(64) << 10;
constexpr size_t kHashBlock = size_t(1) << 20;
constexpr size_t kMaxPiped = size_t(256) << 20;

std::atomic<uint64_t> bytes_moved{0};

/// Error of the next write to such a path.
struct WriteFault {
  std::mutex mutex;
  int error = 0;
  std::string pattern;
  std::atomic<bool> armed{false};
} write_fault;

void inject_write_error(const std::string& path) {
  if (!write_fault.armed.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(write_fault.mutex);
  if (!write_fault.armed || ::fnmatch(write_fault.pattern.c_str(), path.c_str(), 0) != 0) return;
  write_fault.armed = false;
  errno = write_fault.error;
  throw_errno(path, "cannot write");
}

struct stat status_of(int fd, const std::string& path) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw_errno(path, "cannot read");
  return status;
}

std::string_view kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

/// Removes the file if its writer was interrupted; false if that is still writing it. Locks end
/// with their process.
bool remove_stale(const std::string& name) {
  const FileDescriptor file(::open(name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (file.get() >= 0 && ::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return false;
  }
  if (::unlink(name.c_str()) != 0 && errno != ENOENT) throw_errno(name, "cannot remove it");
  return true;
}

/// New, locked file next to `path`, and its name: `path`.tmp unless another writer has that.
std::pair<FileDescriptor, std::string> open_temporary(const std::string& path) {
  for (int number = 1;;) {
    std::string name = number == 1 ? path + ".tmp" : fmt::format("{}.tmp-{}", path, number);
    FileDescriptor file(
        ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (file.get() < 0) {
      if (errno != EEXIST) throw_errno(name, "cannot open");
      if (!remove_stale(name)) ++number;
      continue;
    }
    // Another writer may have taken it for a stale one before it was locked.
    const bool is_locked = ::flock(file.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
    if (is_locked && is_named(file.get(), name)) return {std::move(file), std::move(name)};
  }
}

void fill(int fd, const std::string& path, std::string_view text) {
  write_at(fd, path, text.data(), text.size(), 0);
  sync_file(fd, path);
}

}  // namespace

void throw_errno(const std::string& path, std::string_view what) {
  throw IoError(fmt::format("{}: {}: {}", path, what, describe_errno(errno)));
}

std::string_view without_bom(std::string_view text) {
  constexpr std::string_view kBom = "\xef\xbb\xbf";
  return text.starts_with(kBom) ? text.substr(kBom.size()) : text;
}

FileDescriptor::FileDescriptor(const std::string& path, int flags, int mode)
    : fd_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {
  if (fd_ >= 0) return;
  if (errno == ELOOP && (flags & O_NOFOLLOW)) {
    throw IoError(path + ": a symbolic link: expected a file of its own");
  }
  throw_errno(path, "cannot open");
}
FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

bool path_exists(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR) throw_errno(path, "cannot look at it");
  return false;
}

FileDescriptor open_for_reading(const std::string& path, Source source) {
  // An input named by the user may block until its writer opens it; other files must not block.
  const int flags =
      (source == Source::any ? 0 : O_NONBLOCK) | (source == Source::no_link ? O_NOFOLLOW : 0);
  FileDescriptor file(path, O_RDONLY | O_NOCTTY | flags);
  const mode_t mode = status_of(file.get(), path).st_mode;
  if (!S_ISREG(mode) && (source != Source::any || S_ISDIR(mode) || S_ISBLK(mode))) {
    throw IoError(fmt::format("{}: expected a regular file, found {}", path, kind_of(mode)));
  }
  return file;
}

uint64_t file_size(int fd, const std::string& path) {
  return uint64_t(status_of(fd, path).st_size);
}

size_t read_at(int fd, const std::string& path, void* data, size_t bytes, uint64_t offset) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t got =
        ::pread(fd, static_cast<char*>(data) + done, bytes - done, off_t(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno(path, "cannot read");
    if (got == 0) break;
    done += size_t(got);
    bytes_moved += uint64_t(got);
  }
  return done;
}

std::string read_file(const std::string& path, Source source) {
  const FileDescriptor file = open_for_reading(path, source);
  const struct stat status = status_of(file.get(), path);
  const bool regular = S_ISREG(status.st_mode);
  std::string text;
  try {
    text.resize(regular ? size_t(status.st_size) + 1 : kBlock);  // one more, to detect the end
    size_t done = 0;
    while (true) {
      if (!regular && done > kMaxPiped) {
        throw IoError(fmt::format("{}: {} without an end within {} MiB: expected less", path,
                                  kind_of(status.st_mode), kMaxPiped >> 20));
      }
      if (done == text.size()) text.resize(2 * text.size());
      const ssize_t got = ::read(file.get(), text.data() + done, text.size() - done);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw_errno(path, "cannot read");
      if (got == 0) break;
      done += size_t(got);
      bytes_moved += uint64_t(got);
    }
    text.resize(done);
  } catch (const std::bad_alloc&) {
    throw IoError(fmt::format("{}: not enough memory for its {} bytes", path,
                              std::max<size_t>(text.size(), size_t(status.st_size))));
  } catch (const std::length_error&) {
    throw IoError(fmt::format("{}: {} bytes: too large to read", path, status.st_size));
  }
  return text;
}

std::string read_small_file(const std::string& path, size_t max_bytes) {
  const uint64_t bytes = file_size(open_for_reading(path).get(), path);
  if (bytes > max_bytes) {
    throw IoError(fmt::format("{}: {} bytes: expected at most {}", path, bytes, max_bytes));
  }
  return read_file(path);
}

void fail_next_write(int error, const std::string& pattern) {
  const std::lock_guard lock(write_fault.mutex);
  write_fault.error = error;
  write_fault.pattern = pattern;
  write_fault.armed = true;
}

void write_at(int fd, const std::string& path, const void* data, size_t bytes, uint64_t offset) {
  const auto* at = static_cast<const char*>(data);
  inject_write_error(path);
  while (bytes > 0) {
    const ssize_t put = ::pwrite(fd, at, bytes, off_t(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw_errno(path, "cannot write");
    at += put, bytes -= size_t(put), offset += uint64_t(put);
    bytes_moved += uint64_t(put);
  }
}

void append_to(int fd, const std::string& path, std::string& text) {
  inject_write_error(path);
  while (!text.empty()) {
    const ssize_t put = ::write(fd, text.data(), text.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw_errno(path, "cannot write");
    text.erase(0, size_t(put));
  }
}

uint64_t file_bytes_moved() {
  return bytes_moved;
}

void sync_file(int fd, const std::string& path) {
  if (::fsync(fd) == 0) return;
  if (errno == EINVAL || errno == ENOTSUP || errno == ENOSYS) return;  // FUSE, CIFS
  throw_errno(path, "cannot sync");
}

void write_file(const std::string& path, std::string_view text) {
  const FileDescriptor file(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
  fill(file.get(), path, text);
}

void replace_file(const std::string& path, std::string_view text) {
  const auto [file, temporary] = open_temporary(path);
  std::error_code code;
  try {
    fill(file.get(), temporary, text);
  } catch (const IoError&) {
    std::filesystem::remove(temporary, code);
    throw;
  }
  std::filesystem::rename(temporary, path, code);
  if (code) throw IoError(fmt::format("{}: cannot replace: {}", path, code.message()));
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code code;
  std::filesystem::directory_iterator at(directory, code), end;
  for (; !code && at != end; at.increment(code)) names.push_back(at->path().filename().string());
  if (code == std::errc::no_such_file_or_directory && names.empty()) return {};
  if (code) throw IoError(fmt::format("{}: cannot list: {}", directory, code.message()));
  std::sort(names.begin(), names.end());
  return names;
}

void check_writable(const std::string& path) {
  const bool there = path_exists(path);
  const std::string folder = std::filesystem::path(path).parent_path().string();
  const std::string written = there ? path : folder.empty() ? "." : folder;
  if (::access(written.c_str(), W_OK) != 0) throw_errno(path, "cannot be written");
  if (there && std::filesystem::is_directory(path)) {
    throw IoError(path + ": expected a file, found a directory");
  }
}

void sync_directory(const std::string& path) {
  if (::access(path.c_str(), R_OK) != 0 && errno == EACCES)
    return;  // names may still be created
             // in it
  const FileDescriptor directory(path, O_RDONLY | O_DIRECTORY);
  sync_file(directory.get(), path);
}

void make_directories(const std::string& path) {
  std::vector<std::filesystem::path> missing;
  std::error_code code;
  for (std::filesystem::path at = path; !at.empty() && !std::filesystem::exists(at, code);
       at = at.parent_path()) {
    missing.push_back(at);
  }
  std::filesystem::create_directories(path, code);
  if (code) throw IoError(path + ": cannot create the directory: " + code.message());
  for (const std::filesystem::path& made : missing) {
    sync_directory(made.has_parent_path() ? made.parent_path().string() : ".");
  }
}

void reject_link(const std::string& path) {
  std::error_code unknown;
  if (std::filesystem::is_symlink(path, unknown)) {
    throw IoError(path + ": a symbolic link: expected a folder in its place");
  }
}

bool is_named(int fd, const std::string& path) {
  struct stat opened {
  }, named{};
  return ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

std::optional<uint64_t> free_bytes(const std::string& path) {
  struct statvfs system {};
  if (::statvfs(path.c_str(), &system) != 0 || system.f_blocks == 0) return {};
  const uint64_t blocks = ::geteuid() == 0 ? system.f_bfree : system.f_bavail;
  return blocks * system.f_frsize;
}

std::string content_hash(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}
std::string content_hash(std::string_view text) {
  return content_hash(std::as_bytes(std::span(text.data(), text.size())));
}

std::string content_hash(int fd, const std::string& path, uint64_t begin, uint64_t bytes) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       XXH3_freeState);
  if (!state) throw std::bad_alloc();
  XXH3_128bits_reset(state.get());
  std::vector<std::byte> block(std::min<uint64_t>(bytes, kHashBlock));
  for (uint64_t done = 0; done < bytes;) {
    const size_t wanted = size_t(std::min<uint64_t>(block.size(), bytes - done));
    const size_t got = read_at(fd, path, block.data(), wanted, begin + done);
    XXH3_128bits_update(state.get(), block.data(), got);
    done += got;
    if (got < wanted) {
      throw IoError(fmt::format("{}: ends at byte {}: expected {} (cut while it was read)", path,
                                begin + done, begin + bytes));
    }
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(state.get());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace tandem
