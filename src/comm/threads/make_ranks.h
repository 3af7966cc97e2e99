// Collective construction of communicators whose ranks are threads.
#pragma once

#include <functional>
#include <memory>

#include "comm/world/new_worlds.h"

namespace tandem::threads {

/// Calls make(rank) for every rank, each on its own thread. If one throws, the others' waits on
/// `controls` end with Aborted, and the first error (an original one before any Aborted) is
/// rethrown here after all have ended.
Communicators make_ranks(const Communicators& controls,
                         const std::function<std::shared_ptr<Communicator>(int rank)>& make);

}  // namespace tandem::threads
