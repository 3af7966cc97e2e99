// Rank 0's end of the control plane: a thread that collects every rank's part of an exchange and
// sends all parts to all. It knows who has come, so it can name who has not; it tells everyone when
// a rank fails or its connection breaks. Ends when every rank has left.
#pragma once

#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "comm/control/message.h"

namespace tandem::control {

class Hub {
 public:
  /// `listener` is bound; ranks may connect before and after.
  Hub(Connection listener, int size);
  /// Gives the ranks that are still there a moment to hear what was said last.
  ~Hub();

 private:
  enum class State { absent, here, left };
  struct Part {
    Message message;
    bool here = false;
  };

  void serve();
  void accept_one();
  void handle(int rank, const Message& message);
  void collect(int rank, const Message& message);
  void say_bye();
  void tell_all(const Header& header, const std::string& reason);
  void lose(int rank);

  Connection listener_;
  int size_;
  std::vector<Connection> ranks_;
  std::vector<State> states_;
  uint64_t round_ = 0;  // that is being collected
  std::vector<Part> parts_;
  bool failed_ = false;
  Header failure_{};
  std::string failure_reason_;
  std::atomic<bool> ending_ = false;
  std::thread thread_;
};

}  // namespace tandem::control
