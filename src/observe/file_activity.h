// Progress words while a rank's thread reads or writes files, or waits for a thread that does.
#pragma once

#include <chrono>
#include <string_view>

#include "observe/progress_words.h"

namespace tandem {

class FileActivity {
 public:
  explicit FileActivity(std::string_view name) {
    begin_activity(RankActivity::file, name, std::chrono::steady_clock::now());
  }
  ~FileActivity() { begin_activity(outer_, "", std::chrono::steady_clock::now()); }
  FileActivity(const FileActivity&) = delete;
  FileActivity& operator=(const FileActivity&) = delete;

 private:
  const RankActivity outer_ = current_activity();
};

}  // namespace tandem
