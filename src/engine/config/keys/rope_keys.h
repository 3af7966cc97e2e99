// Keys of a job for the scaling of rotary frequencies (kernels/rope_scaling.h).
#pragma once

#include <vector>

#include "engine/config/config.h"

namespace tandem {

/// `keys` with those, after model.rope_theta.
std::vector<ConfigKey> add_rope_keys(std::vector<ConfigKey> keys);

}  // namespace tandem
