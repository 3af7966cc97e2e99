// Free pages of a cache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tandem {

class PagePool {
 public:
  explicit PagePool(int64_t pages);
  int64_t size() const { return int64_t(is_taken_.size()); }
  int64_t free() const { return int64_t(free_.size()); }
  /// Throws InvalidArgument if none is free.
  int32_t take();
  /// Throws InvalidArgument, and returns nothing, if one of the pages is not taken.
  void give_back(std::span<const int32_t> pages);

 private:
  std::vector<int32_t> free_;
  std::vector<bool> is_taken_;
};

}  // namespace tandem
