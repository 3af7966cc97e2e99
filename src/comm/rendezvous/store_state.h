// State of a rendezvous store, without its connections: keys, counters, leases, watches and
// meetings. Requests come from clients that have proved their identity, but may be wrong all the
// same: an invalid one changes nothing, and its client is to be disconnected.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/store_protocol.h"

namespace tandem::control {

class StoreState {
 public:
  using Send = std::function<void(int client, const Channel::Bytes& bytes)>;
  /// `send`: called for clients in [0, size) that are present.
  StoreState(int size, Send send)
      : gone_(size_t(size), false), leased_by_(size_t(size)), send_(std::move(send)) {}

  /// False if the request is invalid.
  bool handle(int client, const Message& message, Clock::time_point now);
  /// Removes the client's leased keys. `lost`: it ended without a word.
  void remove_client(int client, bool lost);
  /// Removes keys whose lease has passed.
  void expire(Clock::time_point now);
  /// Sends the events since the last call: one message for all clients that watch a family.
  void send_events();

 private:
  struct Value {
    Blob bytes;
    int owner = -1;  ///< client that holds the lease; -1: no lease
    Clock::time_point until = Clock::time_point::max();
  };
  struct Waiting {
    int client;
    uint64_t number;
    std::vector<std::string> keys;
    size_t missing;
  };
  struct Member {
    bool here = false;
    int client = -1;
    std::string compared;
    Blob blob;
  };
  struct Meeting {
    std::vector<Member> members;
    size_t arrived = 0;
    bool gone_count = false;
  };

  /// Clients that watch a family, and its events that are not sent yet.
  struct Family {
    std::vector<int> watchers, removal_watchers;
    Blob events, removals;
  };

  bool set(int client, const Message& message, Clock::time_point now);
  bool get(int client, const Message& message);
  bool add(int client, const Message& message);
  bool meet(int client, const Message& message);
  bool tell_missing(int client, const Message& message);
  void reply(int client, uint64_t number, std::span<const std::byte> blob);
  void reply_values(const Waiting& request);
  void note(Change change, std::string_view key, const Blob& value);
  void remove(std::unordered_map<std::string, Value>::iterator entry, Change change);
  void mark_gone(Meeting& meeting, size_t client);
  void end_if_complete(const std::string& key);

  std::vector<bool> gone_;
  std::vector<std::vector<std::string>> leased_by_;  ///< keys that a client has set with a lease
  Send send_;
  std::unordered_map<std::string, Value> values_;
  std::unordered_map<std::string, std::vector<std::shared_ptr<Waiting>>> waiting_;  // by key
  std::unordered_map<std::string, Meeting> meetings_;
  std::unordered_map<std::string, Family> families_;
  std::unordered_map<std::string, Clock::time_point> leases_;  // keys that values_ has a lease of
};

}  // namespace tandem::control
