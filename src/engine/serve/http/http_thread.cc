#include "engine/serve/http/http_thread.h"

#include <utility>

namespace tandem {

HttpThread::HttpThread(std::string work)
    : work_(std::move(work)), guard_(boost::asio::make_work_guard(context_)), thread_([this] {
        context_.run();
        end_.set_value();
      }) {}

bool HttpThread::ends_by(Clock::time_point until) const {
  return ended_.wait_until(until) == std::future_status::ready;
}

void HttpThread::join() {
  stop();
  if (thread_.joinable()) thread_.join();
}

}  // namespace tandem
