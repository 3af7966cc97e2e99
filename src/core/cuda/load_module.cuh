// Included once by every source file with kernels: it makes their module known to load_modules().
#pragma once

#include "core/cuda/modules.h"

namespace tandem::gpu {
namespace {

// What the module is found by. Never launched.
__global__ void module_marker() {}

const KnownModule module_of_this_file(reinterpret_cast<const void*>(&module_marker));

}  // namespace
}  // namespace tandem::gpu
