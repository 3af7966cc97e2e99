#include "cli/served_folder.h"

#include <fmt/format.h>
#include <poll.h>

#include <chrono>

#include "core/system/printable.h"
#include "core/system/process/clock.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

constexpr int kPollMs = 20, kMaxLastPolls = 50;  // after its end

/// Waits a while for output of the process, and passes it on.
void pass_on_some(LaunchedProcess& process, const PrintLine& print) {
  pollfd ends[] = {{process.output(0), POLLIN, 0}, {process.output(1), POLLIN, 0}};
  poll(ends, 2, kPollMs);
  for (int stream = 0; stream < 2; ++stream) {
    if (process.output(stream) >= 0) process.pass_on(stream, print);
  }
}

/// URL in the line that a server prints when it is ready; empty in another line.
std::string url_in(const std::string& line) {
  constexpr std::string_view kBefore = " at http://";
  const size_t at = line.find(kBefore);
  if (!line.starts_with("Serving ") || at == line.npos) return "";
  const size_t begin = at + kBefore.size() - std::string_view("http://").size();
  return line.substr(begin, line.find_first_of(", \n", begin) - begin);
}

}  // namespace

ServedFolder::ServedFolder(const std::string& folder, const std::vector<std::string>& options) {
  std::vector<std::string> command = {"/proc/self/exe", "serve", folder, "--port", "127.0.0.1:0"};
  command.insert(command.end(), options.begin(), options.end());
  sigset_t none;
  sigemptyset(&none);
  process_.start(command, {}, {}, none);
  wait_for_url(folder);
  reader_ = std::jthread([this](const std::stop_token& over) {
    while (!over.stop_requested()) pass_on_some(process_, print_line);
  });
}

void ServedFolder::wait_for_url(const std::string& folder) {
  const auto begin = std::chrono::steady_clock::now();
  int status = 0;
  while (url_.empty()) {
    const bool has_ended = process_.has_ended(status);
    pass_on_some(process_, [&](int stream, const std::string& line) {
      if (url_.empty()) url_ = url_in(line);
      if (url_.empty()) print_line(stream, line);
    });
    if (has_ended && url_.empty()) {
      for (int i = 0; i < kMaxLastPolls && (process_.output(0) >= 0 || process_.output(1) >= 0);
           ++i) {
        pass_on_some(process_, print_line);
      }
      throw IoError(fmt::format("serve {}: it ended before it was ready", printable(folder)));
    }
  }
  ready_s_ = seconds_since(begin);
}

ServedFolder::~ServedFolder() {
  process_.send_signal(SIGTERM);
  process_.wait_for_end();
  reader_.request_stop();
}

}  // namespace tandem::cli
