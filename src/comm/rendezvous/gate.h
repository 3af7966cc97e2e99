// The door of a listening socket. Who connects has a few seconds and one message of fixed size to
// prove that it belongs to this world; meanwhile nothing waits for it, and it costs a descriptor
// and some two hundred bytes. Of those who have not answered only so many are kept: when another
// comes, the oldest is sent away, and a rank that this happens to comes again.
#pragma once

#include <functional>
#include <list>
#include <vector>

#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/handshake.h"

namespace tandem::control {

class Gate {
 public:
  /// For a world of `size`. The listener does not block.
  Gate(Connection listener, const Credentials& credentials, int size);

  struct Entrant {
    Connection connection;
    int rank;
  };
  /// What becomes of a rank that has proved itself.
  using Check = std::function<Verdict(int rank, int size)>;
  /// Does what can be done now; never waits. Those whom `check` admits.
  std::vector<Entrant> serve(const Check& check);
  /// Hears of nobody any more.
  void close();
  /// The error of the last connection that could not be taken for want of descriptors or memory; 0
  /// where there was none.
  int shortage() const { return shortage_; }

  /// Readable when there is something to do; -1 once closed.
  int fd() const { return epoll_.fd(); }
  size_t waiting() const { return visitors_.size(); }
  /// Who answered, but could not prove it.
  uint64_t refused() const { return refused_; }

 private:
  struct Visitor {
    Visitor(Connection c, const Credentials& credentials)
        : connection(std::move(c)), caller(connection.fd(), credentials) {}
    Connection connection;
    Caller caller;
    Clock::time_point until;
  };

  void welcome_some();
  bool watch(int fd, Visitor* visitor);
  void report(const Visitor& visitor);
  void drop_late();

  Connection listener_, epoll_;
  Credentials credentials_;
  int size_;
  size_t most_;
  std::list<Visitor> visitors_;  // in the order they came
  uint64_t refused_ = 0;
  int shortage_ = 0;
};

}  // namespace tandem::control
