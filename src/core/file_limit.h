// Limit of open files of this process.
#pragma once

namespace tandem {

/// Raises the limit to the maximum that the system grants, and returns it.
int raise_file_limit();

}  // namespace tandem
