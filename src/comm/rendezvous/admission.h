// Admission control of a listening socket. A connecting peer has a few seconds and one message of
// fixed size to prove that it belongs to this world; meanwhile nothing waits for it, and it costs a
// descriptor and some two hundred bytes. The number of pending peers is bounded: a new one beyond
// the bound replaces the oldest, and a rank that is dropped this way connects again.
#pragma once

#include <functional>
#include <list>
#include <vector>

#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/handshake.h"

namespace tandem::control {

class Admission {
 public:
  /// Takes a non-blocking listener of a world of `size`.
  Admission(Connection listener, const Credentials& credentials, int size);

  struct Entrant {
    Connection connection;
    int rank;
  };
  /// Decides on a rank that has proved its identity.
  using Check = std::function<Verdict(int rank, int size)>;
  /// Processes pending events without waiting. Returns the peers that `check` admits.
  std::vector<Entrant> serve(const Check& check);
  /// Stops listening and drops all pending peers.
  void close();
  /// Error of the last connection that could not be accepted for lack of descriptors or memory,
  /// although no pending peer was left to drop; 0 if there was none.
  int shortage() const { return shortage_; }

  /// Descriptor that is readable if there is work; -1 once closed.
  int fd() const { return epoll_.fd(); }
  size_t waiting() const { return visitors_.size(); }
  /// Number of peers whose proof was wrong.
  uint64_t refused() const { return refused_; }

 private:
  struct Visitor {
    Visitor(Connection c, const Credentials& credentials)
        : connection(std::move(c)), caller(connection.fd(), credentials) {}
    Connection connection;
    Caller caller;
    Clock::time_point until;
    std::list<Visitor>::iterator self;
  };

  void welcome_some();
  bool register_fd(int fd, Visitor* visitor);
  void report(const Visitor& visitor);
  void drop_late();

  Connection listener_, epoll_;
  Credentials credentials_;
  int size_;
  size_t maximum_;
  std::list<Visitor> visitors_;  // oldest first
  uint64_t refused_ = 0;
  int shortage_ = 0;
};

}  // namespace tandem::control
