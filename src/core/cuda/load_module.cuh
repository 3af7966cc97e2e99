// Included once by every source file with kernels: registers their module with load_modules().
#pragma once

#include "core/cuda/modules.h"

namespace tandem::gpu {
namespace {

// Identifies the module. Never launched.
__global__ void module_marker() {}

const KnownModule module_of_this_file(reinterpret_cast<const void*>(&module_marker));

}  // namespace
}  // namespace tandem::gpu
