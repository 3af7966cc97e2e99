#include "engine/serve/http/completion_http.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <string_view>

#include "core/system/printable.h"

namespace tandem {
namespace {

namespace beast = boost::beast;
namespace http = beast::http;

struct Route {
  std::string_view path;
  Page page;
  http::verb verb;  ///< get: also head
};
constexpr std::string_view kModelPath = "/v1/models/";
constexpr Route kRoutes[] = {{"/", Page::index, http::verb::get},
                             {"/health", Page::health, http::verb::get},
                             {"/v1/models", Page::models, http::verb::get},
                             {kModelPath, Page::model, http::verb::get},
                             {"/metrics", Page::metrics, http::verb::get},
                             {"/tokenize", Page::tokenize, http::verb::post},
                             {"/v1/completions", Page::completions, http::verb::post},
                             {"/v1/chat/completions", Page::chats, http::verb::post}};

/// nullptr for an unknown path.
const Route* find_route(const HttpRequest& request) {
  std::string_view path = path_of(request);
  if (path.size() > kModelPath.size() && path.starts_with(kModelPath)) path = kModelPath;
  const auto* const route = std::ranges::find(kRoutes, path, &Route::path);
  return route == std::end(kRoutes) ? nullptr : route;
}

/// Compares in a time that does not depend on where they differ.
bool same_secret(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= unsigned(uint8_t(a[i] ^ b[i]));
  return difference == 0;
}

/// Token of an Authorization header's value, "" if it has none; schemes have any case.
std::string_view bearer_token(std::string_view value) {
  constexpr std::string_view kScheme = "bearer ";
  if (!beast::iequals(value.substr(0, kScheme.size()), kScheme)) return {};
  value.remove_prefix(kScheme.size());
  return value.substr(std::min(value.find_first_not_of(' '), value.size()));
}

/// Refuses a client by the header. Throws ApiError.
void check_client(const HttpRequest& request, const CompletionServerOptions& options,
                  const HttpListener& listener) {
  const std::string_view path = path_of(request);
  if (const auto refusal = listener.find_refusal(request)) throw ApiError(*refusal);
  // A page of another site may send a request without asking, though not read the answer.
  const auto origin = request[http::field::origin];
  std::string_view site(origin.data(), origin.size());
  if (const size_t scheme = site.find("://"); scheme != site.npos) site.remove_prefix(scheme + 3);
  if (listener.is_local() && !origin.empty() && !is_local_host(site, options.address.host)) {
    throw ApiError(403, fmt::format("Origin {}: expected a page of this server",
                                    printable({origin.data(), origin.size()})));
  }
  if (options.key.empty() || path == "/" || path == "/health") return;
  if (request.count(http::field::authorization) > 1) {
    throw ApiError(400, "Authorization: expected one");
  }
  const auto header = request[http::field::authorization];
  if (!same_secret(bearer_token({header.data(), header.size()}), options.key)) {
    throw ApiError(401, "Authorization: expected the server's key as a bearer token", "",
                   "invalid_api_key");
  }
}

}  // namespace

std::string model_of(const HttpRequest& request) {
  const std::string_view escaped = path_of(request).substr(kModelPath.size());
  std::string name;
  for (size_t i = 0; i < escaped.size(); ++i) {
    uint8_t byte = 0;
    const char* const digits = escaped.data() + i + 1;
    const bool is_escape = escaped[i] == '%' && i + 2 < escaped.size() &&
                           std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2;
    name += is_escape ? char(byte) : escaped[i];
    if (is_escape) i += 2;
  }
  return name;
}

std::string_view methods_of(const HttpRequest& request) {
  const Route* const route = find_route(request);
  return route && route->verb == http::verb::post ? "POST" : "GET, HEAD";
}

Page find_page(const HttpRequest& request) {
  const Route* const route = find_route(request);
  const std::string path = printable(path_of(request));
  if (!route) throw ApiError(404, fmt::format("{}: no such path", path));
  const bool reads = route->verb == http::verb::get;
  if (request.method() == route->verb || (reads && request.method() == http::verb::head)) {
    return route->page;
  }
  const auto method = request.method_string();
  throw ApiError(405, fmt::format("{} {}: expected {}", printable({method.data(), method.size()}),
                                  path, methods_of(request)));
}

std::optional<ApiError> find_refusal(const HttpRequest& request, boost::system::error_code error,
                                     const CompletionServerOptions& options,
                                     const HttpListener& listener) {
  if (error == http::error::body_limit || error == http::error::header_limit) {
    return ApiError(error == http::error::body_limit ? 413 : 431,
                    fmt::format("request: expected at most {} bytes of header and {} of body",
                                kMaxHeaderBytes, kMaxBodyBytes));
  }
  if (error == http::error::end_of_stream || error == http::error::partial_message) return {};
  if (error.category() == make_error_code(http::error::bad_version).category()) {
    return ApiError(400, fmt::format("request: {}", error.message()));
  }
  if (error) return {};
  // Beast passes over codings that it does not know, and would read the body as a request.
  const auto coding = request[http::field::transfer_encoding];
  if (request.count(http::field::transfer_encoding) > 0 && !beast::iequals(coding, "chunked")) {
    return ApiError(501, fmt::format("Transfer-Encoding: {}: expected chunked",
                                     printable({coding.data(), coding.size()})));
  }
  const auto content = request[http::field::content_encoding];
  if (!content.empty() && !beast::iequals(content, "identity")) {
    return ApiError(415, fmt::format("Content-Encoding: {}: expected none",
                                     printable({content.data(), content.size()})));
  }
  try {
    check_client(request, options, listener);
  } catch (const ApiError& refused) {
    return refused;
  }
  return {};
}

}  // namespace tandem
