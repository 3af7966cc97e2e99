#include "core/system/terminal.h"

#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace tandem {

bool is_terminal(std::FILE* out) {
  const char* term = std::getenv("TERM");
  return isatty(fileno(out)) && !(term && std::string_view(term) == "dumb");
}

bool has_colors(std::FILE* out) {
  const char* forbidden = std::getenv("NO_COLOR");
  return is_terminal(out) && !(forbidden && *forbidden);
}

}  // namespace tandem
