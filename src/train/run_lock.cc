#include "train/run_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "core/files.h"
#include "tandem/error.h"

namespace tandem {

RunLock::RunLock(const std::string& out) : path_(out + "/.lock") {
  do {
    file_.emplace(path_, O_RDWR | O_CREAT, 0644);
    if (::flock(file_->get(), LOCK_EX | LOCK_NB) == 0) continue;
    if (errno != EWOULDBLOCK) return;
    if (!is_current()) continue;  // it has just ended
    std::string holder = read_file(path_);
    if (!holder.empty()) holder = " (process " + holder + ")";
    throw ConfigError(fmt::format(
        "--out {}: another run{} writes to it: wait for its end, or choose another --out", out,
        holder));
  } while (!is_current());
  const std::string process = std::to_string(::getpid());
  if (::ftruncate(file_->get(), 0) != 0) return;  // a process that was killed left its own
  write_at(file_->get(), path_, process.data(), process.size(), 0);
}

// The name goes before the lock does. Whoever opened the file before that finds that it is no
// longer the one with this name.
RunLock::~RunLock() {
  if (is_current()) ::unlink(path_.c_str());
}

bool RunLock::is_current() const {
  struct stat held {
  }, named{};
  return ::fstat(file_->get(), &held) == 0 && ::stat(path_.c_str(), &named) == 0 &&
         held.st_ino == named.st_ino && held.st_dev == named.st_dev;
}

}  // namespace tandem
