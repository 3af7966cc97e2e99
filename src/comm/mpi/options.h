// What WorldOptions may say of a world of MPI ranks.
#pragma once

#include "tandem/communicator.h"

namespace tandem::mpi {

/// Throws InvalidArgument unless `options` fit a world of `size` processes.
void check_options(const WorldOptions& options, int size);

}  // namespace tandem::mpi
