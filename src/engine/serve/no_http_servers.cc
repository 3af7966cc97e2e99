// Stubs of the HTTP servers for a build without Boost.
#include "engine/serve/http/completion_load.h"
#include "engine/serve/http/completion_server.h"
#include "engine/serve/http/live_server.h"
#include "tandem/error.h"

namespace tandem {

void serve_live(const LiveServerOptions&) {
  throw Unsupported("live page: this build has no Boost.Beast (Debian: libboost1.81-dev)");
}

std::unique_ptr<CompletionServer> start_completion_server(const CompletionServerOptions&) {
  throw Unsupported("serve: this build has no Boost.Beast (Debian: libboost1.81-dev)");
}

std::string served_model(const CompletionLoad&) {
  throw Unsupported("bench serve: this build has no Boost.Beast (Debian: libboost1.81-dev)");
}

std::vector<TimedText> send_requests(const CompletionLoad&, std::span<const TimedRequest>,
                                     const std::function<void(const TimedText&)>&) {
  throw Unsupported("bench serve: this build has no Boost.Beast (Debian: libboost1.81-dev)");
}

}  // namespace tandem
