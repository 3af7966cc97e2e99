// Records of a run's ranks, read as they grow: each file's new frames only, and of a long run means
// of several frames, so that memory and time of a reading do not grow with it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "observe/rank_records.h"

namespace tandem::report {

class LiveRanks {
 public:
  /// `newest_frames`: only so many of a rank are kept, each as it was written; 0: all of them, of a
  /// long run as means.
  explicit LiveRanks(std::string folder, size_t newest_frames = 0)
      : folder_(std::move(folder)), newest_frames_(newest_frames) {}

  /// Reads what was written since the last call. Returns whether there was anything. Damaged files
  /// are left out, with a line in `problems`.
  bool refresh();
  /// Histories of the ranks of the last start, by rank, of at most 128 frames each, or the newest.
  std::vector<RankHistory> histories() const;
  /// A line for each damaged file.
  std::vector<std::string> problems() const;

 private:
  struct File {
    RankRecordsReader reader;
    bool is_open = false;
    std::string problem = {};
  };
  struct Rank {
    RankHistory history;
    int64_t begin = 0, began_ns = -1;  ///< of its last start
  };
  void begin_start(const RankRecordsReader& reader);
  void add_frame(Rank& rank, const RankFrame& frame) const;
  void fold();

  std::string folder_;
  size_t newest_frames_;
  std::map<std::string, File> files_;
  std::map<int, Rank> ranks_;
  int64_t newest_ns_ = -1, newest_begin_ = 0;
  int num_ranks_ = 0;
  int64_t block_ = 1;  // steps that share a frame
};

}  // namespace tandem::report
