#include "comm/rendezvous/secret.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "core/system/env.h"
#include "core/system/file_descriptor.h"
#include "tandem/error.h"

namespace tandem::control {
namespace {

constexpr size_t kMinSecret = 16, kMaxSecret = 4096;

Secret secret_from(std::string_view text, const std::string& source) {
  if (text.size() < kMinSecret || text.size() > kMaxSecret) {
    throw InvalidArgument(fmt::format(
        "{}: a secret of {}{} bytes: expected {} to {} (openssl rand -hex 32 makes one)", source,
        text.size() > kMaxSecret ? "more than " : "", std::min(text.size(), kMaxSecret), kMinSecret,
        kMaxSecret));
  }
  return {sha256(std::as_bytes(std::span(text.data(), text.size()))), source};
}

// Reads without blocking: a FIFO's writer may never open it.
std::string text_of_file(const std::string& path, const std::string& source) {
  const FileDescriptor file(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  struct stat status {};
  if (fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    throw InvalidArgument(fmt::format("{}: expected a plain file", source));
  }
  if (status.st_uid != geteuid()) {
    throw InvalidArgument(fmt::format("{}: belongs to user {}: expected this user, {}", source,
                                      status.st_uid, geteuid()));
  }
  if ((status.st_mode & 077) != 0) {
    throw InvalidArgument(fmt::format("{}: mode {:04o}: expected 0600, closed to all others",
                                      source, status.st_mode & 07777));
  }
  std::array<char, kMaxSecret + 2> buffer;
  std::string text;
  for (;;) {
    const ssize_t got = read(file.get(), buffer.data(), buffer.size() - text.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw IoError(fmt::format("{}: cannot read: {}", source, std::strerror(errno)));
    text.append(buffer.data(), size_t(got));
    if (got == 0 || text.size() == buffer.size()) break;
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  return text;
}

}  // namespace

Secret read_secret(const std::string& text, const std::string& file) {
  if (!text.empty() && !file.empty()) {
    throw InvalidArgument("TANDEM_SECRET and TANDEM_SECRET_FILE: both are set: expected one");
  }
  if (!text.empty()) return secret_from(text, "TANDEM_SECRET");
  if (file.empty()) return {};
  const std::string source = "TANDEM_SECRET_FILE=" + file;
  return secret_from(text_of_file(file, source), source);
}

Secret secret_of_environment() {
  return read_secret(env().secret, env().secret_file);
}

Digest random_digest() {
  Digest digest;
  size_t have = 0;
  while (have < digest.size()) {
    const ssize_t got = getrandom(digest.data() + have, digest.size() - have, 0);
    if (got > 0) have += size_t(got);
    if (got < 0 && errno != EINTR) {
      throw Error(fmt::format("getrandom: {}", std::strerror(errno)));
    }
  }
  return digest;
}

std::string hex_of(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte b : bytes) text += fmt::format("{:02x}", unsigned(b));
  return text;
}

Credentials credentials_of(const Secret& secret, std::string_view world) {
  const auto name = std::as_bytes(std::span(world.data(), world.size()));
  return {hmac_sha256(secret.key, name), secret.source};
}

}  // namespace tandem::control
