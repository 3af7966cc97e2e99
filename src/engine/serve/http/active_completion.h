// Requests to `tandem serve` whose connections wait: for tokens, and for other threads. Needs
// Boost.
#pragma once

#include <boost/asio.hpp>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/serve/api_error.h"
#include "engine/serve/completion_answer.h"

namespace tandem {

/// Texts of one request, whose tokens arrive while its connection waits.
struct ActiveCompletion {
  ActiveCompletion(const boost::asio::any_io_executor& executor, CompletionAnswer answer_)
      : answer(std::move(answer_)),
        changed(executor, boost::asio::steady_timer::time_point::max()) {}

  CompletionAnswer answer;
  std::vector<int64_t> requests;
  std::string unsent;               ///< events of a stream
  std::optional<ApiError> failure;  ///< instead of an answer
  bool has_token = false;
  std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
  boost::asio::steady_timer changed;

  /// Whether no more tokens will arrive.
  bool has_ended() const { return answer.is_done() || failure; }
};
using Completion = std::shared_ptr<ActiveCompletion>;

/// Work of a request on another thread, for which its connection waits.
struct Work {
  Work(const boost::asio::any_io_executor& executor, std::function<void()> run_)
      : run(std::move(run_)), done(executor, boost::asio::steady_timer::time_point::max()) {}

  std::function<void()> run;
  std::exception_ptr error;
  bool is_done = false;
  boost::asio::steady_timer done;
};

}  // namespace tandem
