// OUT/events.jsonl of `tandem launch`: one JSON object per event of a rank.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/system/file_descriptor.h"
#include "engine/report/ranks/slow_watch.h"

namespace tandem {

struct LaunchEvent {
  const char* event;  ///< "lost", "hung", "corrupt", "recovered", "stopped"
  int rank;           ///< -1: the launcher
  int process;
  std::string host;
  int64_t step;                          ///< the one that it was in; 0: it had begun none
  std::string cause;                     ///< "was ended by signal 9, Killed"
  std::optional<double> noticed_ms;      ///< since its last sign of life
  std::optional<double> recovered_ms{};  ///< from there until all ranks trained again
  std::optional<int> replacement{};      ///< process that has its rank then
  std::string replacement_host{};
  std::optional<int64_t> continues_after{};  ///< step
  std::optional<int64_t> steps_lost{};       ///< finished ones that are made again
};

class EventLog {
 public:
  /// Creates the folder, and adds to a file that is there; `out` may be empty: writes nothing.
  /// Throws IoError.
  explicit EventLog(const std::string& out);
  /// Ignores write errors after the first, which it prints.
  void add(const LaunchEvent& event);
  void add(const report::SlowRank& slow);

 private:
  void write(std::string line);

  std::string path_;
  std::optional<FileDescriptor> file_;
};

}  // namespace tandem
