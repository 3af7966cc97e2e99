// The program that this process runs, to compare between ranks: versions that differ exchange other
// messages, and builds that differ compute other bits.
#pragma once

#include <string>

namespace tandem {

/// "Tandem 0.1.0, build 3f2a…": the linker's build ID of the file that has this code, or without
/// one the commit that was configured.
std::string build_text();

}  // namespace tandem
