// Requests for streamed texts to any server with OpenAI's API, many at once, and the times of their
// parts.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace tandem {

struct ServerUrl {
  std::string host, port;
  std::string path;  ///< before /v1, without a last slash
};

/// Parses "http://HOST[:PORT][/PATH]", with an IPv6 address in brackets. Throws InvalidArgument.
ServerUrl parse_server_url(const std::string& text);

struct TimedRequest {
  double at_s = 0;   ///< time to send it, since the first
  std::string body;  ///< of POST to the load's endpoint, with "stream": true
};

struct TimedText {
  /// Seconds to each part of the text, from the time to send the request, or if that is 0, from
  /// when it was sent. Parts that are read together have the same.
  std::vector<double> arrivals_s;
  double end_s = 0;  ///< to the end of the answer
  int64_t prompt_tokens = 0, cached_tokens = 0;
  int64_t tokens = 0;              ///< parts, if the server does not count tokens
  bool is_counted = false;         ///< by the server
  bool is_answered = false;        ///< the server has sent a status
  std::string error = "not sent";  ///< empty: the text is whole
};

struct CompletionLoad {
  ServerUrl url;
  std::string endpoint = "/v1/completions";  ///< or "/v1/chat/completions"
  std::string key;                           ///< sent as a bearer token, unless empty
  int streams = 1;                           ///< texts that are awaited at once
  double deadline_s = 600;                   ///< of one request
};

/// Name of the first model that the server lists. Throws IoError if it does not answer.
std::string served_model(const CompletionLoad& load);

/// Sends the requests in order, and returns their texts. `done`: called after each with its number.
/// If no server answers several requests in a row, the rest are not sent.
std::vector<TimedText> send_requests(const CompletionLoad& load,
                                     std::span<const TimedRequest> requests,
                                     const std::function<void(const TimedText&)>& done);

}  // namespace tandem
