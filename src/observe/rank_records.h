// Phases of every rank and step, in files of OUT/ranks, one a rank and start of the run. Nothing is
// exchanged for them: each rank appends to its own file, 34 bytes for a step or, if steps are
// short, for as many as take 80 ms: at most 1.6 MB an hour.
//
// A file is a header and frames. A frame of n steps, a power of two, ends with a multiple of n, so
// that frames of different ranks have common ends. Times have 11 significant bits: errors are below
// 0.025 %.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/system/file_descriptor.h"
#include "observe/phases.h"

namespace tandem {

struct RankPosition {
  int rank = 0;
  int ranks = 1;               ///< of the run
  int tp = 0, dp = 0, pp = 0;  ///< coordinates
  bool on_gpu = false;         ///< times are those of the host that enqueues work
  std::string host = {};
  std::optional<int> cp = {};  ///< coordinate, of a run with context parallelism
  bool operator==(const RankPosition&) const = default;
};

/// "tp 0, cp 1, dp 2, pp 0, host a"
std::string describe(const RankPosition& position);

/// Means over consecutive steps.
struct RankFrame {
  int64_t step = 0;  ///< the last one
  int steps = 1;
  double step_ms = 0;
  PhaseTimes phases{};
};

class RankRecords {
 public:
  /// Begins the file of a start of the run after step `begin` in `folder`, which is made. Throws
  /// IoError, also if the folder is a link.
  RankRecords(const std::string& folder, const RankPosition& position, int64_t begin);
  /// Writes what is left; errors are ignored.
  ~RankRecords();
  RankRecords(const RankRecords&) = delete;
  RankRecords& operator=(const RankRecords&) = delete;

  /// Adds a step that follows the one before. Throws IoError; the frames are then written with
  /// later ones.
  void add(int64_t step, double step_ms, const PhaseTimes& phases);

 private:
  void end_frame();

  std::string path_;
  FileDescriptor file_;
  RankFrame sums_;
  int64_t steps_per_frame_ = 1;
  std::string unwritten_;
  std::chrono::steady_clock::time_point written_;
};

/// File of a rank's start, which may grow while it is read.
class RankRecordsReader {
 public:
  explicit RankRecordsReader(std::string path) : path_(std::move(path)) {}

  /// Reads the header. False if the file is too short to have one yet. Throws IoError naming a
  /// file that has another format.
  bool read_header();
  const RankPosition& position() const { return position_; }
  int64_t begin() const { return begin_; }        ///< the start is after this step
  int64_t began_ns() const { return began_ns_; }  ///< since 1970
  /// Frames since the last call, at most `max_frames`; an incomplete last one is left for the next
  /// call. Throws IoError for a damaged file.
  std::vector<RankFrame> read_frames(size_t max_frames);

 private:
  std::string path_;
  RankPosition position_;
  int64_t begin_ = 0, began_ns_ = 0, last_step_ = 0;
  uint64_t read_ = 0;  // bytes
  size_t frame_bytes_ = 0;
};

/// Frames of a rank, in order of steps: of a step that several starts have made, those of the last.
struct RankHistory {
  RankPosition position;
  std::vector<RankFrame> frames;
};

/// Histories of the ranks of the last start, by rank. An incomplete last frame is ignored. Empty
/// without the folder. Throws IoError naming a file that is damaged or has another format.
std::vector<RankHistory> read_rank_records(const std::string& folder);

}  // namespace tandem
