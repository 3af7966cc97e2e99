// Messages between `tandem launch --hosts` and the executor that it has started on each host.
//
//   launcher -> executor: start (slot; variables as JSON), signal (slot; number), decisions
//   executor -> launcher: build, once connected; started (slot; process), output (slot; stream and
//     a line), closed (slot: no output follows), hung (slot; reason), ended (slot; wait's status
//     and text), failed (slot; reason: its first process cannot be started), progress
//
// Decisions and progress are those of the membership board (board_mirror.h); without one their
// bytes are empty. Each end sends one at least once a second, as a sign of life.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/handshake.h"

namespace tandem {

/// Credentials of the executors and the launcher, their server, for the handshake.
control::Credentials executor_credentials(const std::string& secret, const std::string& run_id);

/// Bytes of a command, a variable or a path as text for JSON, and back: names need not be UTF-8.
std::string text_of_bytes(std::string_view bytes);
std::string bytes_of_text(std::string_view text);

constexpr auto kSignOfLife = std::chrono::seconds(1);

enum class Order : uint64_t { start, signal, decisions };
enum class Report : uint64_t {
  build,
  started,
  output,
  closed,
  hung,
  ended,
  failed,
  progress,
};

class ExecutorChannel {
 public:
  ExecutorChannel() = default;
  explicit ExecutorChannel(control::Connection connection) : channel_(std::move(connection)) {}

  int fd() const { return channel_.connection().fd(); }
  bool open() const { return fd() >= 0; }
  void close() { channel_ = control::Channel(); }
  /// Whether bytes wait until the other end accepts them.
  bool queued() const { return channel_.queued(); }
  short events() const { return short(queued() ? POLLIN | POLLOUT : POLLIN); }

  /// Sends a message, without waiting; `word`: an Order or a Report.
  template <typename Word>
  void send(Word word, int slot, uint64_t value, std::string_view text) {
    send_bytes(uint64_t(word), slot, value, text);
  }
  /// Receives what has arrived, and sends what was queued. False once the other end is gone.
  using Receive =
      std::function<void(uint64_t word, int slot, uint64_t value, std::string_view text)>;
  bool serve(const Receive& receive);
  /// Time since the last message has arrived.
  std::chrono::duration<double> silence() const { return control::Clock::now() - heard_; }
  bool is_due(control::Clock::time_point now) const { return now - sent_ >= kSignOfLife; }

 private:
  void send_bytes(uint64_t word, int slot, uint64_t value, std::string_view text);

  control::Channel channel_;
  control::Clock::time_point heard_ = control::Clock::now(), sent_{};
};

}  // namespace tandem
