#include "engine/report/ranks/live_ranks.h"

#include <algorithm>
#include <utility>

#include "core/system/files.h"
#include "engine/report/ranks/rank_rows.h"
#include "tandem/error.h"

namespace tandem::report {
namespace {

constexpr size_t kMaxLiveFrames = 128;    // of a rank
constexpr size_t kFramesPerRead = 20000;  // 600 kB

}  // namespace

void LiveRanks::begin_start(const RankRecordsReader& reader) {
  Rank& rank = ranks_[reader.position().rank];
  if (reader.began_ns() < rank.began_ns) return;
  rank.begin = reader.begin();
  rank.began_ns = reader.began_ns();
  rank.history.position = reader.position();
  std::erase_if(rank.history.frames, [&](const RankFrame& f) { return f.step > reader.begin(); });
  if (reader.began_ns() <= newest_ns_) return;
  newest_ns_ = reader.began_ns();
  newest_begin_ = reader.begin();
  num_ranks_ = reader.position().ranks;
}

/// Frames of one block become one.
void LiveRanks::add_frame(Rank& rank, const RankFrame& frame) const {
  auto& frames = rank.history.frames;
  const auto block_of = [&](const RankFrame& f) { return (f.step - 1) / block_; };
  if (!frames.empty() && block_of(frames.back()) == block_of(frame)) {
    merge_frame(frames.back(), frame);
  } else {
    frames.push_back(frame);
  }
}

void LiveRanks::fold() {
  block_ *= 2;
  for (auto& [number, rank] : ranks_) {
    const std::vector<RankFrame> frames = std::exchange(rank.history.frames, {});
    for (const RankFrame& frame : frames) add_frame(rank, frame);
  }
}

bool LiveRanks::refresh() {
  std::vector<File*> found;
  for (const std::string& name : names_in(folder_)) {
    if (!name.ends_with(".records")) continue;
    const auto [at, is_new] =
        files_.try_emplace(name, File{RankRecordsReader(folder_ + "/" + name)});
    File& file = at->second;
    try {
      const int64_t before = file.reader.began_ns();
      RankRecordsReader latest(folder_ + "/" + name);
      if (!file.problem.empty() || !latest.read_header()) continue;
      if (!file.is_open ||
          latest.began_ns() != before) {  // a start from the same step overwrites it
        file.reader = std::move(latest);
        file.is_open = false;
      }
      found.push_back(&file);
    } catch (const IoError& error) {
      file.problem = error.what();
    }
  }
  std::ranges::stable_sort(found, {}, [](const File* file) { return file->reader.began_ns(); });
  bool has_grown = false;
  for (File* file : found) {
    if (!std::exchange(file->is_open, true)) begin_start(file->reader);
    Rank& rank = ranks_[file->reader.position().rank];
    if (file->reader.began_ns() != rank.began_ns) continue;  // an earlier start, read before
    try {
      for (;;) {
        const std::vector<RankFrame> frames = file->reader.read_frames(kFramesPerRead);
        if (frames.empty()) break;
        has_grown = true;
        for (const RankFrame& frame : frames) {
          add_frame(rank, frame);
          if (newest_frames_ > 0 && rank.history.frames.size() > newest_frames_) {
            rank.history.frames.erase(rank.history.frames.begin());
          } else if (rank.history.frames.size() > kMaxLiveFrames) {
            fold();
          }
        }
      }
    } catch (const IoError& error) {
      file->problem = error.what();
    }
  }
  return has_grown;
}

std::vector<RankHistory> LiveRanks::histories() const {
  std::vector<RankHistory> histories;
  for (const auto& [number, rank] : ranks_) {
    if (number < num_ranks_ && rank.begin == newest_begin_) histories.push_back(rank.history);
  }
  return histories;
}

std::vector<std::string> LiveRanks::problems() const {
  std::vector<std::string> problems;
  for (const auto& [name, file] : files_) {
    if (!file.problem.empty()) problems.push_back(file.problem);
  }
  return problems;
}

}  // namespace tandem::report
