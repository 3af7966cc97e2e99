#include "comm/processes/bootstrap.h"

#include <algorithm>

namespace tandem::processes {

bool Bootstrap::everywhere(bool here, std::string_view what) {
  const auto all = gather(uint8_t(here), what);
  return std::all_of(all.begin(), all.end(), [](uint8_t there) { return there != 0; });
}

}  // namespace tandem::processes
