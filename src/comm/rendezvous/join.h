// A rank's way to its hub: it connects and proves itself, again and again until the deadline while
// nobody listens, or who listens sends it away before hearing it.
#pragma once

#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/launch.h"

namespace tandem::control {

/// Throws Timeout naming rank 0, and what went wrong last, when the hub does not let this rank in
/// within `seconds`; InvalidArgument naming the variable, never its value, when the secrets differ
/// or one has none; Mismatch for another world size; InvalidArgument for a rank that is taken;
/// Error where who listens is another user, or does not know the secret.
Connection join(const Launch& launch, const Credentials& credentials, double seconds);

}  // namespace tandem::control
