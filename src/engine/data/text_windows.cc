#include "engine/data/text_windows.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/files.h"
#include "tandem/error.h"

namespace tandem {
namespace {

int64_t windows_in(int64_t bytes, int64_t seq, int64_t stride) {
  if (bytes == 0) return 0;
  return bytes <= seq ? 1 : 1 + (bytes - seq + stride - 1) / stride;
}

}  // namespace

TextWindows::TextWindows(std::vector<std::string> paths, std::span<const int64_t> sizes,
                         int64_t seq, int64_t stride, int64_t max_bytes)
    : paths_(std::move(paths)),
      sizes_(sizes.begin(), sizes.end()),
      starts_{0},
      seq_(seq),
      stride_(stride) {
  for (const int64_t size : sizes_) {
    starts_.push_back(starts_.back() + windows_in(size, seq, stride));
  }
  count_ = starts_.back();
  const int64_t total = std::accumulate(sizes_.begin(), sizes_.end(), int64_t(0));
  if (max_bytes > 0 && total > max_bytes) {
    count_ = std::clamp<int64_t>(max_bytes / stride, 1, count_);
  }
}

TextWindow TextWindows::read(int64_t index) const {
  const auto number = int64_t(__int128(index) * starts_.back() / count_);
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), number);
  const auto file = size_t(after - starts_.begin()) - 1;
  const std::string& path = paths_[file];
  TextWindow window;
  window.begin = (number - starts_[file]) * stride_;
  if (window.begin > 0) window.first_scored = window.begin - stride_ + seq_;
  window.offset = std::max<int64_t>(0, window.begin - 1);
  window.bytes.resize(size_t(std::min(sizes_[file], window.begin + seq_) - window.offset));
  const FileDescriptor descriptor = open_for_reading(path);
  const auto size = int64_t(file_size(descriptor.get(), path));
  const bool same = size == sizes_[file] &&
                    read_at(descriptor.get(), path, window.bytes.data(), window.bytes.size(),
                            uint64_t(window.offset)) == window.bytes.size();
  if (same) return window;
  throw IoError(fmt::format("{}: changed since training began: holds {} bytes: expected {}", path,
                            size, sizes_[file]));
}

}  // namespace tandem
