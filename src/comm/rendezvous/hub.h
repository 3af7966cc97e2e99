// Rank 0's end of the control plane: a thread that lets the ranks in, collects every rank's part of
// an exchange and sends all parts to all. It knows who has come, so it can name who has not; it
// tells everyone when a rank fails or its connection breaks. It waits for no single connection, in
// the handshake or later. Once all ranks are here it listens no more. Ends when every rank has
// left.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/gate.h"
#include "core/fork.h"

namespace tandem::control {

class Hub {
 public:
  /// `own` leads to rank 0 itself. `listener` is bound, ranks may connect before and after; it is
  /// not open where rank 0 is alone.
  Hub(Connection own, Connection listener, const Credentials& credentials, int size);
  /// Gives the ranks that are still there a moment to hear what was said last.
  ~Hub();
  /// Why rank 0 failed: what ranks are told that are still there after that moment.
  void set_last_words(std::string reason) { last_words_ = std::move(reason); }

 private:
  enum class State { absent, here, left };
  struct Part {
    Message message;
    bool here = false;
  };

  void serve();
  void serve_rank(int rank);
  void let_in();
  void handle(int rank, const Message& message);
  void collect(int rank, const Message& message);
  void send(int rank, Channel::Bytes bytes);
  void say_bye();
  void tell_all(int origin, std::string_view reason);
  void lose(int rank);

  int size_;
  std::optional<Gate> gate_;
  std::vector<Channel> ranks_;
  std::vector<State> states_;
  uint64_t round_ = 0;  // that is being collected
  std::vector<Part> parts_;
  Channel::Bytes failure_;  // the first, once there is one
  std::string last_words_;  // until it ends, its owner's
  std::atomic<bool> ending_ = false;
  const ProcessMark process_;
  std::thread thread_;
};

}  // namespace tandem::control
