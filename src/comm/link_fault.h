// Fault for tests: a slow connection between two ranks on an emulated link.
#pragma once

namespace tandem {

/// From now on messages of the calling rank to `peer`, a rank of the world, take `factor` times as
/// long; those to other ranks do not wait for them. -1: none.
void slow_link(int peer, double factor);

}  // namespace tandem
