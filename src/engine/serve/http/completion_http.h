// Requests to `tandem serve` as HTTP has them: their page, and why they are refused. Needs Boost.
#pragma once

#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "engine/serve/http/completion_server.h"

namespace tandem {

using HttpRequest = boost::beast::http::request<boost::beast::http::string_body>;

constexpr size_t kMaxHeaderBytes = 16 << 10, kMaxBodyBytes = 8 << 20;

enum class Page : uint8_t { index, health, models, model, metrics, tokenize, completions, chats };
/// Throws ApiError: 404 for an unknown path, 405 for another method than the path's.
Page find_page(const HttpRequest& request);
/// Name in the path of a model, without escapes.
std::string model_of(const HttpRequest& request);

/// Reason to refuse a request whose header, or whole, was read with `error`; nullopt also if the
/// client has left. `is_local`: only this machine can connect.
std::optional<ApiError> find_refusal(const HttpRequest& request, boost::system::error_code error,
                                     const CompletionServerOptions& options, bool is_local);

/// Reads what is left of a request that was refused, for a while, so that its client reads the
/// answer and not an error of its connection.
boost::asio::awaitable<void> drop_input(boost::beast::tcp_stream& stream);

/// State of a client by its connection: it may have sent all it will, and still read, or be gone.
enum class ClientState : uint8_t { open, half_closed, gone };
ClientState state_of(boost::asio::ip::tcp::socket& socket);

/// Fields of every answer.
void set_fields(boost::beast::http::response_header<>& header, const char* type);

}  // namespace tandem
