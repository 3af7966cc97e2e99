// Limit of open files of this process.
#pragma once

#include <string>

namespace tandem {

/// Reason that an errno gives; of too many open files with the limit of this process.
std::string describe_errno(int error);
/// Raises the limit to the maximum that the system grants, and returns it.
int raise_file_limit();

}  // namespace tandem
