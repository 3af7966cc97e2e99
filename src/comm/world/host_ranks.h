// Communicator of a rank's second thread.
#pragma once

#include <memory>

#include "tandem/communicator.h"

namespace tandem {

/// Communicator of the same ranks, on the host also if they are GPUs: its tensors are in host
/// memory. Another thread may use it while this one uses `comm`, which must outlive it. Collective.
std::unique_ptr<Communicator> split_on_host(Communicator& comm);

}  // namespace tandem
