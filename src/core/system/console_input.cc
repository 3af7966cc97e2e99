#include "core/system/console_input.h"

#include <fmt/format.h>

#include <unistd.h>

#include <cerrno>

#include "core/system/files.h"
#include "tandem/error.h"

namespace tandem {

std::string read_input(const std::string& option, size_t max_mib) {
  std::string text;
  char block[65536];
  while (true) {
    const ssize_t got = ::read(STDIN_FILENO, block, sizeof block);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno(option + ": standard input", "cannot read");
    if (got == 0) return text;
    text.append(block, size_t(got));
    if (text.size() > max_mib << 20) {
      throw InvalidArgument(
          fmt::format("{}: standard input: expected at most {} MiB", option, max_mib));
    }
  }
}

}  // namespace tandem
