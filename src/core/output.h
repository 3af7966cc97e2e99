// Files of results, wherever their name leads: to a disk, a pipe or a device.
#pragma once

#include <string>
#include <string_view>

namespace tandem {

/// Creates or truncates and writes all of it. Unlike `write_file` it does not wait for the disk,
/// which pipes and devices do not have. Throws IoError naming the file and the system's reason.
void write_output(const std::string& path, std::string_view text);

}  // namespace tandem
