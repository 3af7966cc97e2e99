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
constexpr int kMaxUnanswered = 8;               // requests in a row

std::string short_text(std::string_view text) {
  return printable(std::string(text.substr(0, kMaxMessage)));
}

/// A server's refusal.
struct StatusError : IoError {
  using IoError::IoError;
};

/// An IPv6 address as in a URL.
std::string bracketed(const std::string& host) {
  return host.find(':') == host.npos ? host : "[" + host + "]";
}

int64_t number_of(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_number() ? found->get<int64_t>() : 0;
}

/// Text of a part, of a completion or a chat; nullptr if it has none.
const std::string* text_of(const Json& choice) {
  const auto delta = choice.find("delta");
  const Json& source = delta != choice.end() && delta->is_object() ? *delta : choice;
  const auto text = source.find(&source == &choice ? "text" : "content");
  return text == source.end() ? nullptr : text->get_ptr<const std::string*>();
}

/// Adds the events of an answer as they arrive.
class EventReader {
 public:
  EventReader(TimedText& text, Clock::time_point begin) : text_(text), begin_(begin) {}

  /// `body`: the answer so far; `is_whole`: all of it.
  void read(std::string_view body, bool is_whole) {
    now_s_ = std::chrono::duration<double>(Clock::now() - begin_).count();
    while (read_ < body.size()) {
      size_t end = body.find_first_of("\r\n", read_);
      if (end == body.npos && !is_whole) return;
      end = std::min(end, body.size());
      take(body.substr(read_, end - read_));
      read_ = end + 1;
    }
  }
  bool is_done() const { return is_done_; }

 private:
  void take(std::string_view line) {
    constexpr std::string_view kData = "data:";
    if (!line.starts_with(kData)) return;
    line.remove_prefix(kData.size());
    while (line.starts_with(' ')) line.remove_prefix(1);
    if (line == "[DONE]") {
      is_done_ = true;
    } else {
      add(Json::parse(line));
    }
  }
  void add(const Json& event) {
    if (const auto error = event.find("error"); error != event.end() && !error->is_null()) {
      throw IoError(short_text(error->dump()));
    }
    if (const auto usage = event.find("usage"); usage != event.end() && usage->is_object()) {
      text_.is_counted = true;
      text_.prompt_tokens = number_of(*usage, "prompt_tokens");
      text_.tokens = number_of(*usage, "completion_tokens");
      const auto details = usage->find("prompt_tokens_details");
      if (details != usage->end() && details->is_object()) {
        text_.cached_tokens = number_of(*details, "cached_tokens");
      }
    }
    const auto choices = event.find("choices");
    if (choices == event.end() || choices->empty()) return;
    const std::string* const text = text_of(choices->front());
    if (text == nullptr || text->empty()) return;
    text_.arrivals_s.push_back(now_s_);
    if (!text_.is_counted) ++text_.tokens;
  }

  TimedText& text_;
  const Clock::time_point begin_;
  double now_s_ = 0;
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
    for (int i = 0; i < load_.streams; ++i) {
      asio::co_spawn(io_, send_some(), [](const std::exception_ptr& thrown) {
        if (thrown) std::rethrow_exception(thrown);
      });
    }
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
          answer = co_await exchange(http::verb::get, path, "",
                                     [](std::string_view, bool) { return false; });
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

  /// Returns the body of the answer. on_body(the answer so far, whether it is whole): true ends it.
  template <typename OnBody>
  asio::awaitable<std::string> exchange(http::verb verb, std::string path, std::string body,
                                        OnBody on_body) {
    beast::tcp_stream stream(io_);
    stream.expires_after(std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(load_.deadline_s)));
    co_await stream.async_connect(endpoints_, asio::use_awaitable);
    stream.socket().set_option(asio::ip::tcp::no_delay(true));
    http::request<http::string_body> request(verb, load_.url.path + path, 11);
    request.set(http::field::host, bracketed(load_.url.host) + ":" + load_.url.port);
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
      if (!parser.is_header_done() || parser.get().result() != http::status::ok) continue;
      if (on_body(std::string_view(parser.get().body()), parser.is_done())) break;
    }
    if (parser.get().result() != http::status::ok) {
      throw StatusError(
          fmt::format("status {}: {}", parser.get().result_int(), short_text(parser.get().body())));
    }
    co_return std::move(parser.get().body());
  }

  asio::awaitable<void> send_some() {
    while (next_ < requests_.size() && unanswered_ < kMaxUnanswered) {
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
        co_await exchange(http::verb::post, load_.endpoint, request.body,
                          [&](std::string_view body, bool is_whole) {
                            text.is_answered = true;
                            reader.read(body, is_whole);
                            return reader.is_done();
                          });
        text.error = reader.is_done() ? "" : "the answer ends before [DONE]";
      } catch (const StatusError& error) {
        text.is_answered = true;
        text.error = error.what();
      } catch (const boost::system::system_error& error) {
        text.error = error.code().message();
      } catch (const std::exception& error) {
        text.error = error.what();
      }
      text.end_s = std::chrono::duration<double>(Clock::now() - begin).count();
      unanswered_ = text.is_answered ? 0 : unanswered_ + 1;
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
      fmt::format("http://{}:{}{}", bracketed(load.url.host), load.url.port, load.url.path);
  try {
    const std::function<void(const TimedText&)> none = [](const TimedText&) {};
    const Json models = Json::parse(Sender(load, {}, none).get("/v1/models"));
    return models.at("data").at(0).at("id");
  } catch (const boost::system::system_error& error) {
    throw IoError(fmt::format("{}/v1/models: {}", where, error.code().message()));
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
