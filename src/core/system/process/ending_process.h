// Processes that are about to end.
#pragma once

#include <sys/types.h>

namespace tandem {

/// Whether a process of this host has ended, or is ending: it or a process above it, as its
/// launcher, was killed. False for one that this process may not see.
bool is_ending(pid_t pid);

}  // namespace tandem
