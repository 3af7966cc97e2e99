// HTTP server of `tandem serve`: OpenAI's interface, numbers for Prometheus and a page to chat with
// the model. Connections share one thread; what takes long (parsing, tokens, long answers) runs on
// two others, one of them for small requests. A client that leaves ends its texts; slow and hostile
// ones cost bounded memory and time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/serve/completion_request.h"
#include "engine/serve/http/listen_address.h"
#include "engine/serve/serve_loop.h"

namespace tandem {

struct CompletionServerOptions {
  ListenAddress address;
  std::string key;  ///< that requests must give as a bearer token; empty: none
};

class CompletionServer {
 public:
  virtual ~CompletionServer() = default;
  /// Address, as "http://127.0.0.1:8000/".
  virtual std::string url() const = 0;
  /// Whether only this machine can reach it.
  virtual bool is_local() const = 0;
  /// Answers requests from now on; both must outlive this object. Before, and after `loop.end()`,
  /// requests get status 503.
  virtual void open(const ServedModel& model, ServeLoop& loop) = 0;
  /// Tokens of one step.
  virtual void deliver(std::vector<TokenEvent> tokens) = 0;
  /// Answers all requests, also those of texts that are being written, with status 503 and
  /// `reason`.
  virtual void fail(const std::string& reason) = 0;
  /// Waits a few seconds for answers that are being sent, then closes all connections, and says so.
  /// Returns the work that does not end within its time, "" if all has: with such work this object,
  /// and those of `open`, must not be destroyed.
  virtual std::string close() = 0;
};

/// Listens, and answers on a thread of its own. Throws IoError if it cannot listen, Unsupported if
/// the build has no Boost.
std::unique_ptr<CompletionServer> start_completion_server(const CompletionServerOptions& options);

}  // namespace tandem
