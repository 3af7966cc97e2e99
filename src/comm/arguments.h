// Argument checks of every transport, made before anything is sent. All throw InvalidArgument
// naming the value.
#pragma once

#include <cstddef>

#include "tandem/communicator.h"

namespace tandem {

void check_allocation(size_t bytes, int signals);
void check_put(int ranks, int peer, const SymmetricBuffer& buffer, size_t offset, size_t bytes,
               int signal);
/// `call`: name of the call that takes the signal.
void check_signal(const SymmetricBuffer& buffer, int signal, const char* call);

}  // namespace tandem
