// First group of a new world whose ranks are threads.
#pragma once

#include <memory>

#include "comm/threads/world.h"

namespace tandem::threads {

/// Throws InvalidArgument for ranks < 1, more than fit into this machine's memory, or a bad link.
std::shared_ptr<Group> new_group(const WorldOptions& options);

}  // namespace tandem::threads
