#include "engine/checkpoint/run/run_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "core/system/files.h"
#include "core/system/process/ending_process.h"
#include "tandem/error.h"

namespace tandem {

namespace {

/// For a killed process, such as the rank of a killed launcher, to end.
constexpr double kEndingPatienceS = 15;

/// Whether the system tells if the folder was replaced: a network file system may be away.
bool is_known(int fd, const std::string& path) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 && (::stat(path.c_str(), &status) == 0 || errno == ENOENT);
}

/// Name of a `train` output found in OUT; empty if it holds no run.
std::string find_run(const std::string& out) {
  for (const char* name : {"checkpoints", "final", "metrics.jsonl"}) {
    if (path_exists(out + "/" + name)) return name;
  }
  return "";
}

}  // namespace

RunLock::RunLock(const std::string& out, double patience_s, const char* name)
    : out_(out), path_(out + "/" + name) {
  lock(patience_s);
}

void RunLock::lock(double patience_s) {
  const auto begin = std::chrono::steady_clock::now();
  folder_ = FileDescriptor(out_, O_RDONLY | O_DIRECTORY);  // keeps the inode number from being
                                                           // reused
  do {
    file_.reset();
    file_.emplace(path_, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK);
    if (::flock(file_->get(), LOCK_EX | LOCK_NB) == 0) continue;
    if (errno != EWOULDBLOCK) return;
    if (!is_current()) continue;  // its holder has just ended
    const std::string process = read_holder();
    const bool ends = !process.empty() && is_ending(pid_t(std::atoi(process.c_str())));
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    if (waited.count() < (ends ? std::max(kEndingPatienceS, patience_s) : patience_s)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      file_.reset();
      continue;
    }
    const std::string holder = process.empty() ? "" : " (process " + process + ")";
    file_.reset();
    throw ConfigError(fmt::format(
        "--out {}: another run{} writes to it: wait for its end, or choose another --out", out_,
        holder));
  } while (!is_current());
  const std::string process = std::to_string(::getpid());
  if (::ftruncate(file_->get(), 0) != 0) return;  // clears the process id of a killed run
  write_at(file_->get(), path_, process.data(), process.size(), 0);
}

/// Number of the process that has the lock; empty if it has not written it yet.
std::string RunLock::read_holder() const {
  try {
    return read_file(path_);
  } catch (const IoError&) {  // it has just ended
    return "";
  }
}

void RunLock::check() const {
  const std::lock_guard lock(mutex_);
  check_owner();
}

void RunLock::check_owner() const {
  if (is_current() || !is_known(folder_->get(), out_)) return;
  const bool is_removed = !is_named(folder_->get(), out_);
  std::string owner;
  if (path_exists(path_)) {
    const FileDescriptor found(path_, O_RDWR | O_NOFOLLOW | O_NONBLOCK);
    const bool is_taken = ::flock(found.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (is_taken) owner = "process " + read_holder();
  }
  if (owner.empty() && is_removed) owner = find_run(out_);
  if (owner.empty()) return;
  throw ConfigError(fmt::format(
      "--out {}: the folder of this run {} ({}): nothing is saved there", out_,
      is_removed ? "was removed, and holds another run's now" : "was taken by another run", owner));
}

bool RunLock::is_locked() const {
  const std::lock_guard lock(mutex_);
  return is_current();
}

bool RunLock::renew() {
  const std::lock_guard lock(mutex_);
  check_owner();
  if (is_current()) return false;
  const bool is_removed = !is_named(folder_->get(), out_);
  make_directories(out_);
  this->lock(0);
  return is_removed;
}

void require_no_run(const std::string& out) {
  const std::string found = find_run(out);
  if (found.empty()) return;
  throw ConfigError(
      fmt::format("--out {}: already holds a run ({}): pass --resume to go on with it, or another "
                  "--out",
                  out, found));
}

// Unlinks before the lock is released: a process that opened the file earlier then finds that it no
// longer has this name.
RunLock::~RunLock() {
  if (is_current()) ::unlink(path_.c_str());
}

bool RunLock::is_current() const {
  return file_ && is_named(file_->get(), path_);
}

}  // namespace tandem
