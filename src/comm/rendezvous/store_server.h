// Rendezvous store: a thread that admits the clients of a world, one for each rank, and serves
// their requests (store_protocol.h). It waits for no single connection, in the handshake or later,
// and listens until all clients have come: until then a connection of a stranger costs it what
// Admission says.
#pragma once

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/rendezvous/admission.h"
#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/store_state.h"
#include "core/system/process/fork.h"

namespace tandem::control {

class StoreServer {
 public:
  /// `listener` is bound; clients may connect before and after. Throws IoError.
  StoreServer(Connection listener, const Credentials& credentials, int size);
  /// Gives clients that are present a moment to leave, and after `end_with` those that are late a
  /// moment to come.
  ~StoreServer();
  /// Sets why the world is not formed, and the rank that caused it: ranks present at the end are
  /// told.
  void end_with(int origin, std::string reason) {
    origin_ = origin;
    last_words_ = std::move(reason);
  }

 private:
  enum class State { absent, here, gone };
  struct Client {
    Channel channel;
    State state = State::absent;
    bool wants_to_write = false;
  };

  void serve();
  void let_in();
  void report_shortage();
  void report_failure(int origin, std::string_view reason);
  void serve_client(int rank);
  void send(int rank, const Channel::Bytes& bytes);
  void write(int rank);
  void end_client(int rank, bool lost);
  bool watch_fd(int operation, int fd, uint32_t events, uint64_t what);

  Connection epoll_, stop_;
  Admission admission_;
  std::vector<Client> clients_;
  StoreState state_;
  int here_ = 0, joined_ = 0;
  bool reported_ = false;  ///< that a rank could not be let in
  int origin_ = 0;         ///< this and the next: written only by the owner until ending_
  std::string last_words_;
  std::atomic<bool> ending_ = false;
  const ProcessMark process_;
  std::thread thread_;
};

}  // namespace tandem::control
