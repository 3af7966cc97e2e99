// Rendezvous server of the control plane, on rank 0: a thread that admits the ranks, collects every
// rank's blob of an exchange and sends all blobs to all ranks. It knows which ranks have arrived,
// so it can name the missing one; it tells every rank when one fails or its connection breaks. It
// waits for no single connection, in the handshake or later. Once all ranks are connected it stops
// listening. Ends when every rank has left.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/rendezvous/admission.h"
#include "comm/rendezvous/connection.h"
#include "core/fork.h"

namespace tandem::control {

class RendezvousServer {
 public:
  /// `local` connects rank 0 itself. `listener` is bound, ranks may connect before and after; it is
  /// not open if rank 0 is the only rank.
  RendezvousServer(Connection local, Connection listener, const Credentials& credentials, int size);
  /// Gives remaining ranks a moment to receive the last messages.
  ~RendezvousServer();
  /// Sets rank 0's reason for failing, sent to ranks that remain after that moment.
  void set_last_words(std::string reason) { last_words_ = std::move(reason); }

 private:
  enum class State { absent, here, left };
  struct Contribution {
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
  std::optional<Admission> admission_;
  std::vector<Channel> ranks_;
  std::vector<State> states_;
  uint64_t round_ = 0;  // number of the exchange being collected
  std::vector<Contribution> contributions_;
  Channel::Bytes failure_;  // first failure, if any
  std::string last_words_;  // written only by the owner until ending_
  std::atomic<bool> ending_ = false;
  const ProcessMark process_;
  std::thread thread_;
};

}  // namespace tandem::control
