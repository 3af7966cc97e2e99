// Thread of an HTTP server: runs what is posted to its context. Needs Boost.
#pragma once

#include <boost/asio.hpp>
#include <chrono>
#include <future>
#include <string>
#include <thread>

namespace tandem {

class HttpThread {
 public:
  using Clock = std::chrono::steady_clock;

  /// `work`: name of its work, for messages.
  explicit HttpThread(std::string work);
  /// Ends it, after the handler that runs.
  ~HttpThread() { join(); }
  HttpThread(const HttpThread&) = delete;

  boost::asio::io_context& context() { return context_; }
  const std::string& work() const { return work_; }
  /// Begins no further handler.
  void stop() { context_.stop(); }
  /// After `stop`: whether its last handler has ended, for which this waits.
  bool ends_by(Clock::time_point until) const;
  void join();

 private:
  const std::string work_;
  boost::asio::io_context context_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> guard_;
  std::promise<void> end_;
  const std::future<void> ended_ = end_.get_future();
  std::thread thread_;
};

}  // namespace tandem
