// Fault for tests: a write to a file that fails, as on a full or broken disk.
#pragma once

#include <string>

namespace tandem {

/// Fails the next `write_at` or `append_to` of this process (core/system/file_descriptor.h) to a
/// path that matches the pattern (fnmatch) with this errno, before any byte is written.
void fail_next_write(int error, const std::string& pattern);

}  // namespace tandem
