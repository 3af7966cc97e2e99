#include "core/system/process/file_limit.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace tandem {

std::string describe_errno(int error) {
  const std::string reason = std::strerror(error);
  rlimit limit{};
  if (error != EMFILE || getrlimit(RLIMIT_NOFILE, &limit) != 0) return reason;
  return reason + " (this process may open " + std::to_string(limit.rlim_cur) + ": ulimit -n)";
}

int raise_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  return int(std::min<rlim_t>(limit.rlim_cur, 1 << 30));
}

}  // namespace tandem
