#include "engine/data/text/text_windows.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/system/files.h"
#include "engine/model/config.h"
#include "tandem/error.h"

namespace tandem {

TextWindows::TextWindows(std::vector<std::string> paths, std::span<const int64_t> sizes,
                         int64_t seq, int64_t stride, int64_t max_bytes,
                         std::vector<std::shared_ptr<DataFile>> contents)
    : paths_(std::move(paths)),
      contents_(std::move(contents)),
      sizes_(sizes.begin(), sizes.end()),
      starts_{0},
      seq_(seq),
      stride_(stride) {
  for (const int64_t size : sizes_) {
    starts_.push_back(starts_.back() + count_windows(size, seq, stride));
  }
  const int64_t total = std::accumulate(sizes_.begin(), sizes_.end(), int64_t(0));
  set_count(starts_.back(), total, stride, max_bytes);
}

void TextWindows::read_bytes(size_t file, int64_t offset, std::span<uint8_t> bytes) const {
  if (!contents_.empty() && contents_[file]) {
    return contents_[file]->read(uint64_t(offset), std::as_writable_bytes(bytes));
  }
  const std::string& path = paths_[file];
  const FileDescriptor descriptor = open_for_reading(path);
  const auto size = int64_t(file_size(descriptor.get(), path));
  const bool same = size == sizes_[file] && read_at(descriptor.get(), path, bytes.data(),
                                                    bytes.size(), uint64_t(offset)) == bytes.size();
  if (same) return;
  throw IoError(fmt::format("{}: changed since training began: holds {} bytes: expected {}", path,
                            size, sizes_[file]));
}

ScoredWindow TextWindows::read(int64_t index) const {
  const int64_t number = window(index);
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), number);
  const auto file = size_t(after - starts_.begin()) - 1;
  const int64_t begin = (number - starts_[file]) * stride_;
  const int64_t offset = std::max<int64_t>(0, begin - 1);
  const int64_t positions = std::min(seq_, sizes_[file] - begin);
  std::vector<uint8_t> bytes(size_t(begin + positions - offset));
  read_bytes(file, offset, bytes);
  ScoredWindow result;
  if (begin == 0) result.tokens.push_back(kBos);
  result.tokens.insert(result.tokens.end(), bytes.begin(), bytes.end() - 1);
  result.targets.assign(bytes.end() - positions, bytes.end());
  const int64_t context = begin > 0 ? seq_ - stride_ : 0;
  std::fill_n(result.targets.begin(), std::min(context, positions), -1);
  return result;
}

}  // namespace tandem
