// Checks of a request to launch, before anything starts.
#pragma once

#include <string>

#include "engine/launch/local_launch.h"

namespace tandem {

/// Whether a lost rank makes all of them start again: they have nothing to continue from.
bool restarts_all(const LaunchRequest& request);
/// Throws InvalidArgument unless processes of the command can take another's rank.
void check_replaceable(const LaunchRequest& request);
/// Folder of the run and its events, which the live page reads. Throws InvalidArgument unless the
/// command trains and names it.
std::string live_folder(const LaunchRequest& request);

}  // namespace tandem
