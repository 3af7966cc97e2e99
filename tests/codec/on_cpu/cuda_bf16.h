// CPU replacement of CUDA's header of this name.
#pragma once

#include "tests/codec/on_cpu/warp.h"
