// Creates this process's rank of an Engine's world, for the duration of a callback or as long as it
// is owned. Both throw InvalidArgument for options that do not fit a world of processes, and if one
// is open in this process already.
#pragma once

#include <functional>

#include "comm/processes/engine.h"
#include "comm/world/new_worlds.h"

namespace tandem::processes {

void run(Engine& engine, const WorldOptions& options,
         const std::function<void(Communicator&)>& body);
Communicators new_rank(Engine& engine, const WorldOptions& options);
/// A rank with an engine of its own, so that a process may hold several, and any number of worlds
/// one after another. Its destruction waits until all ranks of its world have left, for at most one
/// deadline, or 2 s if a wait of this rank has timed out. Throws as Engine.
std::shared_ptr<Communicator> new_member(std::unique_ptr<Bootstrap> bootstrap,
                                         const WorldOptions& options);

}  // namespace tandem::processes
