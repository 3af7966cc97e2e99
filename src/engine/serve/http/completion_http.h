// Requests to `tandem serve` as HTTP has them: their page, and why they are refused. Needs Boost.
#pragma once

#include <boost/beast/http.hpp>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "engine/serve/http/completion_server.h"
#include "engine/serve/http/http_listen.h"

namespace tandem {

constexpr size_t kMaxHeaderBytes = 16 << 10, kMaxBodyBytes = 8 << 20;

/// Methods of the request's path, as Allow lists them.
std::string_view methods_of(const HttpRequest& request);

enum class Page : uint8_t { index, health, models, model, metrics, tokenize, completions, chats };
/// Throws ApiError: 404 for an unknown path, 405 for another method than the path's.
Page find_page(const HttpRequest& request);
/// Name in the path of a model, without escapes.
std::string model_of(const HttpRequest& request);

/// Reason to refuse a request whose header, or whole, was read with `error`; nullopt also if the
/// client has left.
std::optional<ApiError> find_refusal(const HttpRequest& request, boost::system::error_code error,
                                     const CompletionServerOptions& options,
                                     const HttpListener& listener);

}  // namespace tandem
