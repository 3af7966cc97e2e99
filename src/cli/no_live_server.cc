// Stub of the live page for a build without Boost.
#include "cli/live_server.h"
#include "tandem/error.h"

namespace tandem::cli {

void serve_live(const LiveServerOptions&) {
  throw Unsupported("live page: this build has no Boost.Beast (Debian: libboost1.81-dev)");
}

}  // namespace tandem::cli
