// Windows in which files of text are scored: each file separately, kBos before its first byte. Only
// a window's bytes are read, so a file may be of any size.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/data/data_file.h"
#include "engine/data/scored_windows.h"

namespace tandem {

/// Position p of a file holds kBos (p = 0) or byte p - 1, and predicts byte p.
class TextWindows : public ScoredWindows {
 public:
  /// Splits files of `sizes` bytes into windows of `seq` positions; of more than `max_bytes` (0: no
  /// limit), uses only as many windows as score about that, evenly spread over all files.
  /// `contents`: of compressed files, nullptr for others; or empty.
  TextWindows(std::vector<std::string> paths, std::span<const int64_t> sizes, int64_t seq,
              int64_t stride, int64_t max_bytes,
              std::vector<std::shared_ptr<DataFile>> contents = {});
  ScoredWindow read(int64_t index) const override;

 private:
  void read_bytes(size_t file, int64_t offset, std::span<uint8_t> bytes) const;

  std::vector<std::string> paths_;
  std::vector<std::shared_ptr<DataFile>> contents_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> starts_;  ///< index of each file's first window, then the total
  int64_t seq_, stride_;
};

}  // namespace tandem
