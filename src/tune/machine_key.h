// Machine and build, on which measured times depend in addition to the operator, its shape and its
// ranks.
#pragma once

#include <string>

#include "tandem/communicator.h"

namespace tandem {

/// Text that begins the key of a tuner's entry: processor, cores, instruction sets, libraries and
/// build; for GPU ranks the versions of their libraries and the build. Times of another machine or
/// build are ignored.
std::string machine_key(const Communicator& comm);

}  // namespace tandem
