#include "engine/infer/cache/page_pool.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem {

PagePool::PagePool(int64_t pages) : is_taken_(size_t(pages), false) {
  for (int64_t page = pages - 1; page >= 0; --page) free_.push_back(int32_t(page));
}

int32_t PagePool::take() {
  if (free_.empty()) {
    throw InvalidArgument(fmt::format("page pool: all {} pages are taken", size()));
  }
  const int32_t page = free_.back();
  free_.pop_back();
  is_taken_[size_t(page)] = true;
  return page;
}

void PagePool::give_back(std::span<const int32_t> pages) {
  for (size_t i = 0; i < pages.size(); ++i) {
    const int32_t page = pages[i];
    if (page >= 0 && page < size() && is_taken_[size_t(page)]) {
      is_taken_[size_t(page)] = false;
      continue;
    }
    for (const int32_t before : pages.first(i)) is_taken_[size_t(before)] = true;
    throw InvalidArgument(fmt::format("page pool: page {} is returned, but not taken", page));
  }
  free_.insert(free_.end(), pages.begin(), pages.end());
}

}  // namespace tandem
