// In the place of the header of this name: there is no emulated link.
#pragma once

#include "comm/device/device_signal.h"

namespace tandem::gpu {

struct Line;

}  // namespace tandem::gpu
