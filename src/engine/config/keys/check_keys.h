// Keys of the table `check`: comparison of state that ranks share, and what a difference does.
#pragma once

#include <vector>

#include "engine/config/config.h"

namespace tandem {

std::vector<ConfigKey> check_keys();

}  // namespace tandem
