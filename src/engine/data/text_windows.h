// Windows in which files are scored: each file separately, windows `stride` apart, each scoring the
// positions that the previous one did not reach. Only a window's bytes are read, so a file may be
// of any size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tandem {

/// Position p of a file holds kBos (p = 0) or byte p - 1, and predicts byte p.
struct TextWindow {
  int64_t begin = 0;             ///< position
  int64_t first_scored = 0;      ///< positions before it are context
  int64_t offset = 0;            ///< file offset of `bytes`
  std::vector<std::byte> bytes;  ///< the window's, and the one before
};

class TextWindows {
 public:
  /// Splits files of `sizes` bytes into windows of `seq` positions; of more than `max_bytes` (0: no
  /// limit), uses only as many windows as score about that, evenly spread over all files.
  TextWindows(std::vector<std::string> paths, std::span<const int64_t> sizes, int64_t seq,
              int64_t stride, int64_t max_bytes);
  int64_t count() const { return count_; }
  int64_t all() const { return starts_.back(); }  ///< without the limit
  /// Throws IoError naming a file that cannot be read or has another size.
  TextWindow read(int64_t index) const;

 private:
  std::vector<std::string> paths_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> starts_;  ///< index of each file's first window, then the total
  int64_t seq_, stride_, count_ = 0;
};

}  // namespace tandem
