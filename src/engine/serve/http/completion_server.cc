#include "engine/serve/http/completion_server.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "core/system/console.h"
#include "core/system/process/file_limit.h"
#include "engine/serve/completion_answer.h"
#include "engine/serve/http/active_completion.h"
#include "engine/serve/http/completion_http.h"
#include "engine/serve/http/http_listen.h"
#include "engine/serve/http/http_thread.h"
#include "engine/serve/serve_metrics.h"
#include "engine/serve/serve_page.h"
#include "tandem/error.h"

namespace tandem {
namespace {

namespace net = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using net::ip::tcp;
using ErrorCode = boost::system::error_code;
using Clock = std::chrono::steady_clock;

constexpr size_t kMaxClients = 1024;
constexpr size_t kMaxAllBodyBytes = 256 << 20;  // of all bodies that are read or answered
constexpr std::chrono::seconds kRequestTime{30}, kWriteTime{30}, kIdleTime{75}, kCloseTime{5},
    kEndTime{30};
constexpr std::chrono::milliseconds kWatchTime{100};  // between looks at a client that waits
/// Max bytes of a body, and tokens of an answer, that do not wait behind larger ones.
constexpr size_t kSmallBodyBytes = 64 << 10;
constexpr int64_t kSmallAnswerTokens = 4096;
constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
constexpr auto kAwait = net::as_tuple(net::use_awaitable);

std::string random_id() {
  static std::mt19937_64 random{std::random_device{}()};
  return fmt::format("{:016x}", random());
}

class BeastCompletionServer : public CompletionServer {
 public:
  explicit BeastCompletionServer(const CompletionServerOptions& options)
      : options_(options), acceptor_(listen_at(http_.context(), options.address, "serve")) {
    raise_file_limit();
    const tcp::endpoint at = acceptor_.local_endpoint();
    is_local_ = at.address().is_loopback();
    url_ = url_of(at, options.address);
    net::co_spawn(http_.context(), accept(), net::detached);
  }
  ~BeastCompletionServer() override {
    for (HttpThread* thread : threads()) thread->join();
  }

  std::string url() const override { return url_; }
  bool is_local() const override { return is_local_; }

  void open(const ServedModel& model, ServeLoop& loop) override {
    net::post(http_.context(), [this, &model, &loop] { model_ = &model, loop_ = &loop; });
  }

  void deliver(std::vector<TokenEvent> tokens) override {
    net::post(http_.context(), [this, tokens = std::move(tokens)] {
      for (const TokenEvent& token : tokens) take(token);
    });
  }

  void fail(const std::string& reason) override {
    net::post(http_.context(), [this, reason] {
      failure_ = ApiError(503, "the server is ending: " + reason);
      for (const auto& [request, choice] : active_) {
        choice.first->failure = failure_;
        choice.first->changed.cancel();
      }
    });
  }

  std::string close() override {
    const size_t unsent = await_answers(Clock::now() + kCloseTime);
    if (unsent > 0) {
      complain(fmt::format("serve: closing {} connections whose answers were not sent in {} s",
                           unsent, kCloseTime.count()));
    }
    for (HttpThread* thread : threads()) thread->stop();
    const Clock::time_point until = Clock::now() + kEndTime;
    for (const HttpThread* thread : threads()) {
      if (thread->ends_by(until)) continue;
      return fmt::format("{} did not end in {} s", thread->work(), kEndTime.count());
    }
    return "";
  }

 private:
  /// In the order in which they end: the first passes work to the others.
  std::array<HttpThread*, 3> threads() { return {&http_, &small_, &large_}; }

  /// Waits for answers that are being sent. Posted after the last tokens, so that their answers are
  /// counted. Returns the number of those that are not sent by `until`, at least 1 if unknown.
  size_t await_answers(Clock::time_point until) {
    size_t unsent = 1;
    while (unsent > 0 && Clock::now() < until) {
      auto count = net::post(http_.context(), net::use_future([this] { return num_answering_; }));
      if (count.wait_until(until) != std::future_status::ready) break;
      if ((unsent = count.get()) > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return unsent;
  }

  net::awaitable<void> accept() {
    while (true) {
      auto [error, socket] = co_await acceptor_.async_accept(kAwait);
      const bool has_room = (!error && num_clients_ < kMaxClients) || awaited_.close_oldest();
      if (error) {  // as for lack of descriptors, until a client has left
        net::steady_timer timer(http_.context(), std::chrono::milliseconds(100));
        co_await timer.async_wait(kAwait);
      } else if (has_room) {
        net::co_spawn(http_.context(), talk(beast::tcp_stream(std::move(socket))), net::detached);
      }
    }
  }

  /// The requests of one connection.
  net::awaitable<void> talk(beast::tcp_stream stream) {
    const Counted client(num_clients_);
    beast::flat_buffer buffer(kMaxHeaderBytes + kMaxBodyBytes);
    ErrorCode ignored;
    stream.socket().set_option(tcp::no_delay(true), ignored);
    stream.expires_after(kRequestTime);
    for (bool continues = true; continues;) {
      std::optional<AwaitedRequests::Entry> awaited(std::in_place, awaited_, stream);
      http::request_parser<http::string_body> parser;
      parser.header_limit(kMaxHeaderBytes);
      parser.body_limit(kMaxBodyBytes);
      auto [error, size] = co_await http::async_read_header(stream, buffer, parser, kAwait);
      std::optional<ApiError> refused = find_refusal(parser.get(), error, options_, is_local_);
      if (!error && !refused) {
        stream.expires_after(kRequestTime);
        if (beast::iequals(parser.get()[http::field::expect], "100-continue")) {
          co_await net::async_write(stream, net::buffer(kContinue), kAwait);
        }
        while (!error && !parser.is_done() && !awaited->is_refused()) {
          std::tie(error, size) = co_await http::async_read_some(stream, buffer, parser, kAwait);
          awaited->set_bytes(parser.get().body().size());
          if (awaited_.bytes() + answered_bytes_ > kMaxAllBodyBytes) awaited_.refuse_largest();
        }
        if (error) refused = find_refusal(parser.get(), error, options_, is_local_);
        if (awaited->is_refused()) refused = ApiError(503, "too many requests are being read");
      }
      if (refused) {
        awaited.reset();
        parser.get().body() = {};
        co_await refuse(stream, parser.get(), *refused, false);
        co_await drop_input(stream);
      }
      if (error || refused) break;
      awaited.reset();
      const HttpRequest request = parser.release();
      const Counted answering(num_answering_), bytes(answered_bytes_, request.body().size());
      continues = co_await answer(stream, request);
      stream.expires_after(kIdleTime);
    }
    stream.socket().shutdown(tcp::socket::shutdown_send, ignored);
  }

  /// Ends a completion with a block, also by an exception.
  struct Forgotten {
    ~Forgotten() { server.forget(completion); }
    BeastCompletionServer& server;
    const Completion completion;
  };

  /// Adds to a sum while coroutines are in a block.
  struct Counted {
    explicit Counted(size_t& sum_, size_t added_ = 1) : sum(sum_), added(added_) { sum += added; }
    Counted(const Counted&) = delete;
    ~Counted() { sum -= added; }
    size_t& sum;
    const size_t added;
  };

  /// Runs `work`, which may throw, on a thread for those of its size. `work` must be no temporary,
  /// which GCC 12 would destroy twice.
  net::awaitable<void> compute(bool is_small, const std::function<void()>& work) {
    const auto shared = std::make_shared<Work>(http_.context().get_executor(), work);
    net::post((is_small ? small_ : large_).context(), [this, shared] {
      try {
        shared->run();
      } catch (...) {
        shared->error = std::current_exception();
      }
      net::post(http_.context(), [shared] {
        shared->is_done = true;
        shared->done.cancel();
      });
    });
    while (!shared->is_done) co_await shared->done.async_wait(kAwait);
    if (shared->error) std::rethrow_exception(shared->error);
  }

  /// Whether the connection remains open.
  net::awaitable<bool> answer(beast::tcp_stream& stream, const HttpRequest& request) {
    std::optional<ApiError> refused;  // co_await is not allowed in a handler
    std::string text;
    const char* type = "application/json";
    try {
      const Page page = find_page(request);
      switch (page) {
        case Page::completions:
        case Page::chats:
          co_return co_await complete(stream, request, page == Page::chats);
        case Page::tokenize: {
          const std::function<void()> work = [&, &served = model()] {
            text = answer_tokenize(served, request.body());
          };
          co_await compute(is_small(request), work);
          break;
        }
        case Page::index:
          type = "text/html; charset=utf-8";
          text = serve_page();
          break;
        case Page::health:
          model();
          require_open();
          text = R"({"status":"ok"})";
          break;
        case Page::models:
          text = models_json(model());
          break;
        case Page::model:
          text = model_json(model(), model_of(request));
          break;
        case Page::metrics:
          type = "text/plain; version=0.0.4";
          text = metrics_.text(loop_ ? loop_->stats() : ServeLoop::Stats{});
          break;
      }
    } catch (const ApiError& error) {
      refused = error;
    } catch (const std::exception& error) {
      refused = ApiError(500, error.what());
    }
    if (refused) co_return co_await refuse(stream, request, *refused, request.keep_alive());
    co_return co_await send(stream, request, http::status::ok, type, text, request.keep_alive());
  }

  static bool is_small(const HttpRequest& request) {
    return request.body().size() <= kSmallBodyBytes;
  }

  /// Answers a request for texts. Throws ApiError that refuses it.
  net::awaitable<bool> complete(beast::tcp_stream& stream, const HttpRequest& request,
                                bool is_chat) {
    CompletionRequest parsed;
    const std::function<void()> parse = [&, &served = model()] {
      parsed = parse_completion(served, request.body(), is_chat);
    };
    co_await compute(is_small(request), parse);
    const bool streams = parsed.streams;
    const Completion completion = submit(std::move(parsed));
    stream.expires_never();
    const Forgotten forgotten{*this, completion};
    bool is_sent = false;  // no conditional expression: GCC 12 would await both
    if (streams) {
      is_sent = co_await send_stream(stream, request, completion);
    } else {
      is_sent = co_await send_whole(stream, request, completion);
    }
    co_return is_sent&& request.keep_alive();
  }

  const ServedModel& model() const {
    if (failure_) throw ApiError(*failure_);
    if (!model_) throw ApiError(503, "the model is being loaded");
    return *model_;
  }

  void require_open() const {
    if (failure_) throw ApiError(*failure_);
    if (loop_->is_ending()) throw ApiError(503, "the server is ending");
  }

  Completion submit(CompletionRequest parsed) {
    const auto completion = std::make_shared<ActiveCompletion>(
        http_.context().get_executor(), CompletionAnswer(*model_, parsed, random_id()));
    if (const auto texts = int64_t(parsed.choices.size()); texts > loop_->max_unfinished()) {
      throw ApiError(400, fmt::format("{} texts: expected at most {} at once", texts,
                                      loop_->max_unfinished()));
    }
    completion->requests = loop_->submit(std::move(parsed.choices));
    if (completion->requests.empty()) require_open();
    if (completion->requests.empty())
      throw ApiError(429, "too many requests wait: try again later");
    for (size_t i = 0; i < completion->requests.size(); ++i) {
      active_[completion->requests[i]] = {completion, i};
    }
    metrics_.begin(parsed.prompt_tokens);
    completion->unsent = completion->answer.begin();
    return completion;
  }

  void take(const TokenEvent& token) {
    const auto found = active_.find(token.request);
    if (found == active_.end()) return;  // cancelled meanwhile
    const auto [completion, choice] = found->second;
    if (token.finish) active_.erase(found);
    completion->changed.cancel();
    if (token.finish == Finish::failed) {
      completion->failure = ApiError(500, token.error);
      return;
    }
    if (!std::exchange(completion->has_token, true)) {
      const std::chrono::duration<double> waited = Clock::now() - completion->began;
      metrics_.add_first_token(waited.count());
    }
    metrics_.add_token();
    completion->unsent += completion->answer.add(choice, token);
  }

  /// Waits for a change, for a while, and notices that the client has left. One that sends no more
  /// may still read: `probe`, which it ignores, makes a connection that is closed report so.
  static net::awaitable<void> await_change(beast::tcp_stream& stream, const Completion& completion,
                                           std::string_view probe) {
    stream.expires_never();
    completion->changed.expires_after(kWatchTime);
    co_await completion->changed.async_wait(kAwait);
    const ClientState state = state_of(stream.socket());
    if (state == ClientState::gone) completion->is_gone = true;
    if (state != ClientState::half_closed || Clock::now() < completion->next_probe) co_return;
    completion->next_probe = Clock::now() + completion->probe_time;
    completion->probe_time *= 2;
    stream.expires_after(kWriteTime);
    const auto [error, size] = co_await net::async_write(stream, net::buffer(probe), kAwait);
    if (error) completion->is_gone = true;
  }

  /// Cancels what is unfinished.
  void forget(const Completion& completion) {
    for (const int64_t request : completion->requests) {
      if (active_.erase(request) > 0) loop_->cancel(request);
    }
    using End = ServeMetrics::End;
    metrics_.end(completion->answer.is_done() ? End::done
                 : completion->failure        ? End::failed
                                              : End::left);
  }

  net::awaitable<bool> send_whole(beast::tcp_stream& stream, const HttpRequest& request,
                                  Completion completion) {
    // Clients pass over interim answers, which HTTP/1.0 does not have.
    const std::string_view probe = request.version() >= 11 ? kContinue : "";
    while (!completion->has_ended()) co_await await_change(stream, completion, probe);
    if (completion->is_gone) co_return false;
    if (completion->failure) {
      co_return co_await send_error(stream, request, *completion->failure, request.keep_alive());
    }
    std::string text;
    const std::function<void()> write = [&] { text = completion->answer.whole(); };
    co_await compute(completion->answer.tokens() <= kSmallAnswerTokens, write);
    co_return co_await send(stream, request, http::status::ok, "application/json", std::move(text),
                            request.keep_alive());
  }

  net::awaitable<bool> send_stream(beast::tcp_stream& stream, const HttpRequest& request,
                                   Completion completion) {
    http::response<http::empty_body> header(http::status::ok, request.version());
    set_fields(header, "text/event-stream");
    header.keep_alive(request.keep_alive());
    const bool is_chunked = request.version() >= 11;
    header.chunked(is_chunked);
    http::response_serializer<http::empty_body> serializer(header);
    stream.expires_after(kWriteTime);
    auto [error, size] = co_await http::async_write_header(stream, serializer, kAwait);
    const std::string_view probe = is_chunked ? "3\r\n:\n\n\r\n" : ":\n\n";  // a comment
    while (!error && !completion->is_gone) {
      const bool has_ended = completion->has_ended();
      std::string events = std::exchange(completion->unsent, {});
      if (completion->failure) {
        events += "data: " + completion->failure->json() + "\n\n";
      } else if (has_ended) {
        events += completion->answer.end();
      }
      if (!events.empty()) {
        stream.expires_after(kWriteTime);
        const net::const_buffer bytes = net::buffer(events);
        if (is_chunked) {  // no conditional expression: GCC 12 would await both
          std::tie(error, size) =
              co_await net::async_write(stream, http::make_chunk(bytes), kAwait);
        } else {
          std::tie(error, size) = co_await net::async_write(stream, bytes, kAwait);
        }
      }
      if (has_ended) break;
      if (!error && completion->unsent.empty()) co_await await_change(stream, completion, probe);
    }
    if (error || completion->is_gone) co_return false;
    if (!is_chunked) co_return false;  // the end of the connection ends the answer
    stream.expires_after(kWriteTime);
    std::tie(error, size) = co_await net::async_write(stream, http::make_chunk_last(), kAwait);
    co_return !error;
  }

  net::awaitable<bool> refuse(beast::tcp_stream& stream, const HttpRequest& request,
                              const ApiError& error, bool keeps_alive) {
    metrics_.refuse();
    co_return co_await send_error(stream, request, error, keeps_alive);
  }

  net::awaitable<bool> send_error(beast::tcp_stream& stream, const HttpRequest& request,
                                  const ApiError& error, bool keeps_alive) {
    co_return co_await send(stream, request, http::status(error.status), "application/json",
                            error.json(), keeps_alive);
  }

  net::awaitable<bool> send(beast::tcp_stream& stream, const HttpRequest& request,
                            http::status status, const char* type, std::string text,
                            bool keeps_alive) {
    http::response<http::string_body> response(status, request.version());
    set_fields(response, type);
    response.keep_alive(keeps_alive);
    if (status == http::status::method_not_allowed) response.set(http::field::allow, "GET, POST");
    response.body() = std::move(text);
    response.prepare_payload();
    if (request.method() == http::verb::head) response.body().clear();  // not its length
    stream.expires_after(kWriteTime);
    const auto [error, size] = co_await http::async_write(stream, response, kAwait);
    co_return !error && keeps_alive;
  }

  const CompletionServerOptions options_;
  size_t num_clients_ = 0, num_answering_ = 0, answered_bytes_ = 0;
  AwaitedRequests awaited_;
  ServeMetrics metrics_;
  bool is_local_ = false;
  std::string url_;
  const ServedModel* model_ = nullptr;
  ServeLoop* loop_ = nullptr;
  std::optional<ApiError> failure_;                          // for all requests
  std::map<int64_t, std::pair<Completion, size_t>> active_;  // choices that are unfinished
  // Declared last: destroys coroutines, which use the members above.
  HttpThread http_{"the thread of connections"};
  HttpThread small_{"the work for a request"}, large_{"the work for a large request or answer"};
  tcp::acceptor acceptor_;
};

}  // namespace

std::unique_ptr<CompletionServer> start_completion_server(const CompletionServerOptions& options) {
  return std::make_unique<BeastCompletionServer>(options);
}

}  // namespace tandem
