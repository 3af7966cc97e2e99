#include "engine/serve/http/completion_server.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/asio.hpp>
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
#include "engine/serve/http/http_thread.h"
#include "engine/serve/serve_metrics.h"
#include "engine/serve/serve_page.h"
#include "tandem/error.h"

namespace tandem {
namespace {

namespace net = boost::asio;
using ErrorCode = boost::system::error_code;
using Clock = std::chrono::steady_clock;

constexpr HttpLimits kLimits{.clients = 1024,
                             .header_bytes = kMaxHeaderBytes,
                             .body_bytes = kMaxBodyBytes,
                             .all_body_bytes = 256 << 20,
                             .methods = methods_of};
constexpr std::chrono::seconds kCloseTime{5}, kEndTime{30};
/// Max bytes of a body, and tokens of an answer, that do not wait behind larger ones.
constexpr size_t kSmallBodyBytes = 64 << 10;
constexpr int64_t kSmallAnswerTokens = 4096;
constexpr auto kAwait = net::as_tuple(net::use_awaitable);

std::string random_id() {
  static std::mt19937_64 random{std::random_device{}()};
  return fmt::format("{:016x}", random());
}

class BeastCompletionServer : public CompletionServer {
 public:
  explicit BeastCompletionServer(const CompletionServerOptions& options)
      : options_(options),
        listener_(http_.context(), options.address, "serve", kLimits,
                  [this](HttpConnection& connection) { return talk(connection); }) {
    raise_file_limit();
    listener_.start();
  }
  ~BeastCompletionServer() override {
    for (HttpThread* thread : threads()) thread->join();
  }

  std::string url() const override { return listener_.url(); }
  bool is_local() const override { return listener_.is_local(); }

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

  /// The requests of one connection.
  net::awaitable<void> talk(HttpConnection& connection) {
    const HttpConnection::FindRefusal find = [this](const HttpRequest& request, ErrorCode error) {
      return find_refusal(request, error, options_, listener_);
    };
    for (bool continues = true; continues;) {
      const HttpConnection::Read read = co_await connection.read(find);
      if (read.refused) {
        co_await refuse(connection, read.request, *read.refused, false);
        co_await connection.drop_input();
      }
      if (!read.is_whole) break;
      const ScopedCount answering(num_answering_);
      continues = co_await answer(connection, read.request);
    }
  }

  /// Ends a completion with a block, also by an exception.
  struct CompletionGuard {
    ~CompletionGuard() { server.forget(completion); }
    BeastCompletionServer& server;
    const Completion completion;
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
  net::awaitable<bool> answer(HttpConnection& connection, const HttpRequest& request) {
    std::optional<ApiError> refused;  // co_await is not allowed in a handler
    std::string text;
    const char* type = "application/json";
    try {
      const Page page = find_page(request);
      switch (page) {
        case Page::completions:
        case Page::chats:
          co_return co_await complete(connection, request, page == Page::chats);
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
    if (refused) co_return co_await refuse(connection, request, *refused, request.keep_alive());
    co_return co_await connection.send(request, 200, type, text, request.keep_alive());
  }

  static bool is_small(const HttpRequest& request) {
    return request.body().size() <= kSmallBodyBytes;
  }

  /// Answers a request for texts. Throws ApiError that refuses it.
  net::awaitable<bool> complete(HttpConnection& connection, const HttpRequest& request,
                                bool is_chat) {
    CompletionRequest parsed;
    const std::function<void()> parse = [&, &served = model()] {
      parsed = parse_completion(served, request.body(), is_chat);
    };
    co_await compute(is_small(request), parse);
    const bool streams = parsed.streams;
    const Completion completion = submit(std::move(parsed));
    const CompletionGuard guard{*this, completion};
    bool is_sent = false;  // no conditional expression: GCC 12 would await both
    if (streams) {
      is_sent = co_await send_stream(connection, request, completion);
    } else {
      is_sent = co_await send_whole(connection, request, completion);
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
      throw ApiError(400,
                     fmt::format("n: {} texts: expected at most {} at once (--queue of the server)",
                                 texts, loop_->max_unfinished()),
                     "n");
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
    if (token.finish == Finish::failed) {
      completion->failure = ApiError(500, token.error);
      completion->changed.cancel();
      return;
    }
    if (!std::exchange(completion->has_token, true)) {
      const std::chrono::duration<double> waited = Clock::now() - completion->began;
      metrics_.add_first_token(waited.count());
    }
    metrics_.add_token();
    completion->unsent += completion->answer.add(choice, token);
    if (!completion->unsent.empty() || completion->has_ended()) completion->changed.cancel();
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

  net::awaitable<bool> send_whole(HttpConnection& connection, const HttpRequest& request,
                                  Completion completion) {
    while (!completion->has_ended() && !connection.is_gone()) {
      co_await connection.await_change(request, completion->changed);
    }
    if (connection.is_gone()) co_return false;
    if (completion->failure) {
      co_return co_await send_error(connection, request, *completion->failure,
                                    request.keep_alive());
    }
    std::string text;
    const std::function<void()> write = [&] { text = completion->answer.whole(); };
    co_await compute(completion->answer.tokens() <= kSmallAnswerTokens, write);
    co_return co_await connection.send(request, 200, "application/json", text,
                                       request.keep_alive());
  }

  net::awaitable<bool> send_stream(HttpConnection& connection, const HttpRequest& request,
                                   Completion completion) {
    bool is_sent = co_await connection.begin_events(request, request.keep_alive());
    for (bool has_ended = false; is_sent && !has_ended && !connection.is_gone();) {
      has_ended = completion->has_ended();
      std::string events = std::exchange(completion->unsent, {});
      if (completion->failure) {
        events += "data: " + completion->failure->json() + "\n\n";
      } else if (has_ended) {
        events += completion->answer.end();
      }
      if (!events.empty()) is_sent = co_await connection.send_events(events);
      if (is_sent && !completion->has_ended() && completion->unsent.empty()) {
        co_await connection.await_change(request, completion->changed);
      }
    }
    if (!is_sent || connection.is_gone()) co_return false;
    co_return co_await connection.end_events();
  }

  net::awaitable<bool> refuse(HttpConnection& connection, const HttpRequest& request,
                              const ApiError& error, bool keeps_alive) {
    metrics_.refuse();
    co_return co_await send_error(connection, request, error, keeps_alive);
  }

  static net::awaitable<bool> send_error(HttpConnection& connection, const HttpRequest& request,
                                         const ApiError& error, bool keeps_alive) {
    const std::string text = error.json();
    co_return co_await connection.send(request, error.status, "application/json", text,
                                       keeps_alive);
  }

  const CompletionServerOptions options_;
  size_t num_answering_ = 0;
  ServeMetrics metrics_;
  const ServedModel* model_ = nullptr;
  ServeLoop* loop_ = nullptr;
  std::optional<ApiError> failure_;                          // for all requests
  std::map<int64_t, std::pair<Completion, size_t>> active_;  // choices that are unfinished
  // Declared last: destroys coroutines, which use the members above.
  HttpThread http_{"the thread of connections"};
  HttpThread small_{"the work for a request"}, large_{"the work for a large request or answer"};
  HttpListener listener_;
};

}  // namespace

std::unique_ptr<CompletionServer> start_completion_server(const CompletionServerOptions& options) {
  return std::make_unique<BeastCompletionServer>(options);
}

}  // namespace tandem
