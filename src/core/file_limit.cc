#include "core/file_limit.h"

#include <sys/resource.h>

#include <algorithm>

namespace tandem {

int raise_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  return int(std::min<rlim_t>(limit.rlim_cur, 1 << 30));
}

}  // namespace tandem
