// Connection of a rank to a rendezvous server. A world's is shared by the groups that were split
// from it, any of which may receive an abort there.
#pragma once

#include <mutex>
#include <optional>
#include <span>
#include <string_view>

#include "comm/rendezvous/connection.h"
#include "tandem/error.h"

namespace tandem::control {

std::string_view text_of(const Message& message);

constexpr const char* kServerGone = "rank 0 ended without a word";

class ServerConnection {
 public:
  ServerConnection(int rank, Connection connection)
      : rank_(rank), channel_(std::move(connection)) {}

  int rank() const { return rank_; }
  const Connection& connection() const { return channel_.connection(); }
  /// False if the server has not accepted it within `seconds`: nothing more can be sent then. A
  /// disconnected server shows in `receive`.
  bool send(double seconds, const Header& header, std::string_view name = {},
            std::span<const std::byte> blob = {});
  enum class Received { message, timeout, gone };
  /// Throws Aborted for an abort. A server that announced its end counts as gone.
  Received receive(Message& message, double seconds);
  /// Throws Aborted if the server has reported one, now or before, or ended without notice. Never
  /// blocks.
  void look_for_abort();

 private:
  Received receive_now(Message& message);

  const int rank_;
  Channel channel_;
  std::mutex sending_;  // any thread may abort
  bool stuck_ = false;  // part of a message was not sent in time
  std::mutex receiving_;
  std::optional<Aborted> aborted_;
  bool ended_ = false;  // the server announced its end
};

}  // namespace tandem::control
