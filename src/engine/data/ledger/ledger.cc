#include "engine/data/ledger/ledger.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "core/system/files.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Removes what follows the last complete line; returns the number of lines.
int64_t keep_complete_lines(int fd, const std::string& path) {
  std::string text(file_size(fd, path), '\0');
  text.resize(read_at(fd, path, text.data(), text.size(), 0));
  const size_t end = text.rfind('\n') + 1;  // 0 without a newline
  if (end < text.size() && ::ftruncate(fd, off_t(end)) != 0) {
    throw_errno(path, "cannot remove an incomplete line");
  }
  return std::count(text.begin(), text.begin() + std::ptrdiff_t(end), '\n');
}

}  // namespace

Ledger::Ledger(const std::string& path, const LedgerStart& start)
    : path_(path), file_(path, O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW) {
  lines_ = keep_complete_lines(file_.get(), path_);
  synced_bytes_ = int64_t(file_size(file_.get(), path_));
  unsynced_ = to_ledger_line(++lines_, start);
  sync();
  sync_directory(std::filesystem::path(path).parent_path().string());
}

Ledger::~Ledger() {
  if (writing_.valid()) writing_.wait();
}

void Ledger::append(const LedgerStep& step) {
  const std::lock_guard lock(mutex_);
  if (writing_.valid()) writing_.wait();
  unsynced_ += to_ledger_line(++lines_, step);
  try {
    write();
  } catch (const IoError&) {  // tried again before the sync
  }
  try {
    writing_ = std::async(std::launch::async, [this] { sync(); });
  } catch (const std::system_error&) {
    writing_ = {};  // no thread is left: `await` writes
  }
}

void Ledger::await() {
  const std::lock_guard lock(mutex_);
  if (writing_.valid()) writing_.get();
  if (!unsynced_.empty()) sync();
}

bool Ledger::is_in_place() const {
  return is_named(file_.get(), path_);
}

/// A sync that failed may have lost bytes that were written: they are written again.
void Ledger::write() {
  if (is_torn_) {
    if (::ftruncate(file_.get(), off_t(synced_bytes_)) != 0) {
      throw_errno(path_, "cannot remove lines that could not be synced");
    }
    written_ = 0;
  }
  is_torn_ = true;
  std::string text = unsynced_.substr(written_);
  append_to(file_.get(), path_, text);
  written_ = unsynced_.size();
  is_torn_ = false;
}

void Ledger::sync() {
  write();
  is_torn_ = true;
  sync_file(file_.get(), path_);
  is_torn_ = false;
  synced_bytes_ += int64_t(unsynced_.size());
  unsynced_.clear();
  written_ = 0;
}

}  // namespace tandem
