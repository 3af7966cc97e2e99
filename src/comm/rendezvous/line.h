// A rank's connection to a hub. A world's is shared by the groups that were split from it, any of
// which may find an abort there.
#pragma once

#include <mutex>
#include <optional>
#include <span>
#include <string_view>

#include "comm/rendezvous/connection.h"
#include "tandem/error.h"

namespace tandem::control {

std::string_view text_of(const Message& message);

constexpr const char* kHubGone = "rank 0 ended without a word";

class Line {
 public:
  Line(int rank, Connection connection) : rank_(rank), channel_(std::move(connection)) {}

  int rank() const { return rank_; }
  const Connection& connection() const { return channel_.connection(); }
  /// False when the hub has not taken it within `seconds`: nothing more can be sent then. A hub
  /// that is gone shows in `receive`.
  bool send(double seconds, const Header& header, std::string_view name = {},
            std::span<const std::byte> blob = {});
  enum class Received { message, timeout, gone };
  /// Throws Aborted for an abort. A hub that said it would end is gone.
  Received receive(Message& message, double seconds);
  /// Throws Aborted if the hub has told of one, now or before, or ended without a word; does not
  /// wait.
  void look_for_abort();

 private:
  Received receive_now(Message& message);

  const int rank_;
  Channel channel_;
  std::mutex sending_;  // abort comes from any thread
  bool stuck_ = false;  // a part of a message did not leave in time
  std::mutex receiving_;
  std::optional<Aborted> aborted_;
  bool ended_ = false;  // the hub, as it said
};

}  // namespace tandem::control
