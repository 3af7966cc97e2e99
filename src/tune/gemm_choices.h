// Algorithms of the GEMMs of a run on GPUs. They are chosen by timing and determine the bits of
// results, so all ranks and later runs must have the same ones.
#pragma once

#include "tandem/communicator.h"

namespace tandem {

/// Collective, before GEMMs are created: gives every rank the choices of earlier runs in rank 0's
/// file. CPU ranks have none.
void share_gemm_choices(Communicator& ranks);
/// Collective, after GEMMs were created and before they run: for each GEMM all ranks adopt the
/// choice of the lowest rank that timed it, and rank 0 saves it.
void agree_on_gemm_choices(Communicator& ranks);

}  // namespace tandem
