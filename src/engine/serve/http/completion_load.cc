#include "engine/serve/http/completion_load.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <exception>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using Clock = std::chrono::steady_clock;
using Json = nlohmann::json;

constexpr size_t kMaxAnswer = size_t{1} << 28;  // bytes
constexpr size_t kMaxMessage = 200;             // characters of a server's error

std::string short_text(std::string_view text) {
  return printable(std::string(text.substr(0, kMaxMessage)));
}

/// Adds the events of an answer as they arrive.
class EventReader {
 public:
  EventReader(TimedText& text, Clock::time_point begin) : text_(text), begin_(begin) {}

  /// `body`: the answer so far.
  void read(std::string_view body) {
    for (size_t end; (end = body.find('\n', read_)) != body.npos; read_ = end + 1) {
      constexpr std::string_view kData = "data:";
      std::string_view line = body.substr(read_, end - read_);
      if (!line.starts_with(kData)) continue;
      line.remove_prefix(kData.size());
      while (line.starts_with(' ')) line.remove_prefix(1);
      while (line.ends_with('\r')) line.remove_suffix(1);
      if (line == "[DONE]") {
        is_done_ = true;
      } else {
        add(Json::parse(line));
      }
    }
  }
  bool is_done() const { return is_done_; }

 private:
  void add(const Json& event) {
    if (event.contains("error")) throw IoError(short_text(event["error"].dump()));
    if (const auto usage = event.find("usage"); usage != event.end() && usage->is_object()) {
      text_.prompt_tokens = usage->value("prompt_tokens", int64_t(0));
      text_.tokens = usage->value("completion_tokens", int64_t(0));
      const auto details = usage->find("prompt_tokens_details");
      if (details != usage->end() && details->is_object()) {
        const auto cached = details->find("cached_tokens");
        if (cached != details->end() && cached->is_number()) text_.cached_tokens = *cached;
      }
    }
    const auto choices = event.find("choices");
    if (choices == event.end() || choices->empty()) return;
    const Json& choice = choices->front();
    if (!choice.contains("text") || choice["text"].empty()) return;
    if (choice["text"].get_ref<const std::string&>().empty()) return;
    text_.arrivals_s.push_back(std::chrono::duration<double>(Clock::now() - begin_).count());
  }

  TimedText& text_;
  const Clock::time_point begin_;
  size_t read_ = 0;
  bool is_done_ = false;
};

/// All requests of a load, in coroutines of one thread.
class Sender {
 public:
  Sender(const CompletionLoad& load, std::span<const TimedRequest> requests,
         const std::function<void(const TimedText&)>& done)
      : load_(load), requests_(requests), done_(done), texts_(requests.size()) {}

  std::vector<TimedText> run() {
    find_server();
    begin_ = Clock::now();
    for (int i = 0; i < load_.streams; ++i) asio::co_spawn(io_, send_some(), asio::detached);
    io_.run();
    return std::move(texts_);
  }

  std::string get(const std::string& path) {
    find_server();
    std::string answer;
    std::exception_ptr failure;
    asio::co_spawn(
        io_,
        [&]() -> asio::awaitable<void> {
          answer = co_await exchange(http::verb::get, path, "", [](std::string_view) {});
        },
        [&](std::exception_ptr thrown) { failure = std::move(thrown); });
    io_.run();
    if (failure) std::rethrow_exception(failure);
    return answer;
  }

 private:
  void find_server() {
    boost::system::error_code error;
    endpoints_ = asio::ip::tcp::resolver(io_).resolve(load_.url.host, load_.url.port, error);
    if (error) throw IoError(fmt::format("{}: {}", load_.url.host, error.message()));
  }

  /// Returns the body of the answer, of which `on_body` is given each longer part.
  template <typename OnBody>
  asio::awaitable<std::string> exchange(http::verb verb, std::string path, std::string body,
                                        OnBody on_body) {
    beast::tcp_stream stream(io_);
    stream.expires_after(std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(load_.deadline_s)));
    co_await stream.async_connect(endpoints_, asio::use_awaitable);
    stream.socket().set_option(asio::ip::tcp::no_delay(true));
    http::request<http::string_body> request(verb, load_.url.path + path, 11);
    request.set(http::field::host, load_.url.host + ":" + load_.url.port);
    request.set(http::field::content_type, "application/json");
    request.set(http::field::connection, "close");
    if (!load_.key.empty()) request.set(http::field::authorization, "Bearer " + load_.key);
    request.body() = std::move(body);
    request.prepare_payload();
    co_await http::async_write(stream, request, asio::use_awaitable);
    beast::flat_buffer buffer;
    http::response_parser<http::string_body> parser;
    parser.body_limit(kMaxAnswer);
    while (!parser.is_done()) {
      co_await http::async_read_some(stream, buffer, parser, asio::use_awaitable);
      if (parser.is_header_done() && parser.get().result() == http::status::ok) {
        on_body(std::string_view(parser.get().body()));
      }
    }
    if (parser.get().result() != http::status::ok) {
      throw IoError(
          fmt::format("status {}: {}", parser.get().result_int(), short_text(parser.get().body())));
    }
    co_return std::move(parser.get().body());
  }

  asio::awaitable<void> send_some() {
    while (next_ < requests_.size() && unanswered_ < load_.streams) {
      const size_t i = next_++;
      const TimedRequest& request = requests_[i];
      const auto at = begin_ + std::chrono::duration_cast<Clock::duration>(
                                   std::chrono::duration<double>(request.at_s));
      asio::steady_timer timer(io_, at);
      co_await timer.async_wait(asio::use_awaitable);
      TimedText& text = texts_[i];
      const Clock::time_point begin = request.at_s > 0 ? at : Clock::now();
      try {
        EventReader reader(text, begin);
        co_await exchange(http::verb::post, "/v1/completions", request.body,
                          [&](std::string_view body) { reader.read(body); });
        text.error = reader.is_done() ? "" : "the answer ends before [DONE]";
      } catch (const std::exception& error) {
        text.error = error.what();
      }
      text.end_s = std::chrono::duration<double>(Clock::now() - begin).count();
      unanswered_ = text.error.empty() || !text.arrivals_s.empty() ? 0 : unanswered_ + 1;
      done_(text);
    }
  }

  const CompletionLoad& load_;
  std::span<const TimedRequest> requests_;
  const std::function<void(const TimedText&)>& done_;
  std::vector<TimedText> texts_;
  asio::io_context io_{1};
  asio::ip::tcp::resolver::results_type endpoints_;
  Clock::time_point begin_;
  size_t next_ = 0;
  int unanswered_ = 0;  // requests in a row
};

}  // namespace

std::string served_model(const CompletionLoad& load) {
  const std::string where =
      fmt::format("http://{}:{}{}", load.url.host, load.url.port, load.url.path);
  try {
    const std::function<void(const TimedText&)> none = [](const TimedText&) {};
    const Json models = Json::parse(Sender(load, {}, none).get("/v1/models"));
    return models.at("data").at(0).at("id");
  } catch (const std::exception& error) {
    throw IoError(
        fmt::format("{}/v1/models: {}: expected a server with OpenAI's API", where, error.what()));
  }
}

std::vector<TimedText> send_requests(const CompletionLoad& load,
                                     std::span<const TimedRequest> requests,
                                     const std::function<void(const TimedText&)>& done) {
  return Sender(load, requests, done).run();
}

}  // namespace tandem
