// Live page of a run: a small HTTP server that reads the files which the run appends to, and so
// needs nothing of the processes that train. Slow and hostile clients cost it bounded memory and
// the run nothing.
#pragma once

#include <string>
#include <vector>

#include "engine/serve/http/listen_address.h"

namespace tandem {

struct LiveServerOptions {
  std::string dir;  ///< OUT of the run, which need not be there yet
  ListenAddress address;
  int parent = 0;                     ///< if not 0: ends once this is not the parent's process id
  std::vector<std::string> others{};  ///< folders of runs whose curves are drawn, too
};

/// Serves the page, /events (server-sent events), /state.json, /ranks.json and /metrics until
/// SIGINT or SIGTERM, which first send the last state to clients that listen. Prints the address
/// once it listens. Throws IoError if it cannot.
void serve_live(const LiveServerOptions& options);

}  // namespace tandem
