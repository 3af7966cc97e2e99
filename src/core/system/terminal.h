// Terminals among the program's outputs.
#pragma once

#include <cstdio>

namespace tandem {

/// Whether lines of `out` can be redrawn: a terminal other than TERM=dumb.
bool is_terminal(std::FILE* out);
/// Whether text of `out` is coloured: a terminal, unless NO_COLOR is set and not empty
/// (no-color.org).
bool has_colors(std::FILE* out);

}  // namespace tandem
