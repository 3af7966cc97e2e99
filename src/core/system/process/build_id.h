// Identity of the running program, compared between ranks: different versions exchange different
// messages, and different builds compute different bits.
#pragma once

#include <string>

namespace tandem {

/// "Tandem 0.1.0, build 3f2a…": the linker's build ID of the file that contains this code, or, if
/// it has none, the commit at configuration time.
std::string build_text();

}  // namespace tandem
