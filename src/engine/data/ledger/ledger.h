// OUT/ledger.jsonl: the samples that each step of a run consumed. A step's line is written before
// the weights are updated, so that it outlives this process, and synced in the background: it is on
// disk before the next step updates the weights, and before any checkpoint that has the step. Lines
// are only ever appended; `check_ledger` (engine/data/ledger/ledger_check.h) proves with them that
// each sample was consumed once.
#pragma once

#include <future>
#include <mutex>
#include <string>

#include "core/system/file_descriptor.h"
#include "engine/data/ledger/ledger_lines.h"

namespace tandem {

class Ledger {
 public:
  /// Appends `start`, on disk when this returns. An incomplete last line, of a process that was
  /// killed while it wrote, is removed. Throws IoError, also if `path` is a link.
  Ledger(const std::string& path, const LedgerStart& start);
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  /// Writes the line and begins to sync it in the background. Errors are thrown by `await`.
  void append(const LedgerStep& step);
  /// Returns once all lines are on disk. After an IoError they are retained, and the next call
  /// tries again. Any thread may call it.
  void await();
  /// Whether the file still has its name: false if it was removed or replaced.
  bool is_in_place() const;

 private:
  void write();
  void sync();

  std::mutex mutex_;
  std::string path_;
  FileDescriptor file_;
  int64_t lines_ = 0;
  std::string unsynced_;
  size_t written_ = 0;        // bytes of these in the file
  int64_t synced_bytes_ = 0;  // of the file
  bool is_torn_ = false;      // there may be more after them
  std::future<void> writing_;
};

}  // namespace tandem
