// OUT/metrics.jsonl: one JSON object per step, in order, each step once, also across resumes.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "core/system/file_descriptor.h"
#include "core/system/files.h"
#include "engine/model/codec_policy.h"
#include "engine/train/records/step_record.h"

namespace tandem {

std::string to_json_line(const StepRecord& step);
/// One line for each of gradients and weights sent in a wire format: bytes per step, and as a share
/// of the uncompressed ones.
std::vector<std::string> describe_sent(const CodecPolicy& policy, bool error_feedback,
                                       const StepRecord& step);

class MetricsLog : public StepSink {
 public:
  /// Keeps the lines of steps up to `last_step` and drops later ones and a truncated last line.
  /// Damaged lines are moved to PATH.damaged. Logs a warning of these, and of steps without a line.
  MetricsLog(const std::string& path, int64_t last_step);
  /// After an IoError the line is kept: the next call writes it first.
  void add(const StepRecord& step) override;
  /// Tries lines that add() could not write again, and syncs the file. Another thread may add
  /// meanwhile.
  void sync();
  /// Whether the file still has its name: false if it was removed or replaced.
  bool is_in_place() const { return is_named(file_.get(), path_); }

 private:
  std::string path_;
  FileDescriptor file_;
  std::mutex mutex_;
  std::string unwritten_;
};

}  // namespace tandem
