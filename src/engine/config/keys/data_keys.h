// Keys of the table `data`.
#pragma once

#include <vector>

#include "engine/config/config.h"

namespace tandem {

std::vector<ConfigKey> data_keys();

}  // namespace tandem
