// Keys of the table `checkpoint`: snapshots in memory and checkpoints on disk.
#pragma once

#include <vector>

#include "engine/config/config.h"

namespace tandem {

std::vector<ConfigKey> checkpoint_keys();

}  // namespace tandem
