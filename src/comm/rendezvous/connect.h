// Connection of a rank to its rendezvous store: connects and proves the rank's identity, retrying
// until the deadline while nothing listens, or the listener drops it before reading its answer.
#pragma once

#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/launch.h"

namespace tandem::control {

/// Throws Timeout naming rank 0, and the last failure, if the store does not admit this rank
/// within `seconds`; InvalidArgument naming the variable, never its value, if the secrets differ or
/// one is missing; Mismatch for another world size; InvalidArgument for a rank that is already
/// connected; Error if the listener belongs to another user or does not know the secret.
Connection join(const Launch& launch, const Credentials& credentials, double seconds);

}  // namespace tandem::control
