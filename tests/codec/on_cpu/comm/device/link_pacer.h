// CPU replacement of the header of this name: no emulated link.
#pragma once

#include "comm/device/device_signal.h"

namespace tandem::gpu {

struct LinkPacer;

}  // namespace tandem::gpu
