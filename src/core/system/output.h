// Result files on any destination: a disk, a pipe or a device.
#pragma once

#include <string>
#include <string_view>

namespace tandem {

/// Creates or truncates and writes all of `text`. Unlike `write_file` does not fsync, which pipes
/// and devices do not support. Throws IoError with the file and the system's reason.
void write_output(const std::string& path, std::string_view text);

}  // namespace tandem
