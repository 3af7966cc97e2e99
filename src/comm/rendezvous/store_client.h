// A rank's connection to the rendezvous store. Any thread may send requests and receive. Replies
// arrive in objects that the requests return, so that nothing blocks here.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/store_protocol.h"

namespace tandem::control {

class StoreClient {
 public:
  /// Max seconds in which the store accepts not one byte of a message. It waits for nothing, so
  /// only its death takes longer; a whole message of a large exchange may.
  static constexpr double kStallSeconds = 30;

  StoreClient(int rank, Connection connection, double stall_s = kStallSeconds)
      : rank_(rank), stall_s_(stall_s), channel_(std::move(connection)) {}

  int fd() const { return channel_.connection().fd(); }

  struct Reply {
    std::atomic<bool> here = false;
    Message message;  ///< once `here`
  };
  using Pending = std::shared_ptr<Reply>;

  /// `lease_s`: seconds after which the key is removed without another `set`; it also ends with
  /// this connection. 0: never removed.
  void set(std::string_view key, std::span<const std::byte> value, int lease_s = 0);
  /// Values of the keys, empty for those that do not exist. `wait`: replied to when all exist.
  Pending get(std::span<const std::string> keys, bool wait);
  Pending add(std::string_view key, int64_t number);
  /// Passes removals of keys of this family to `receive` from now on. `settings`: these, too.
  void watch(std::string_view family, bool settings = false);
  /// Meets the other members under that name, which no other meeting may have; each member's
  /// `index` differs. `compared` must be equal on all of them; the blobs are exchanged.
  struct Meeting {
    std::string_view name;
    int count = 1, index = 0;
    std::string_view compared{};
    std::span<const std::byte> blob{};
    bool gone_count = false;  ///< clients that are gone count as arrived; index: the rank
  };
  Pending meet(const Meeting& meeting);
  /// Members that have not arrived at a meeting.
  Pending ask_missing(std::string_view meeting);
  void leave();

  static std::vector<Blob> values(const Reply& reply);
  static int64_t number(const Reply& reply);
  static Met met(const Reply& reply);
  static std::vector<int> missing(const Reply& reply);

  /// Receives what has arrived, without waiting, up to the reply `last`. False if the store has
  /// gone, of which no reply tells.
  using OnEvent = std::function<void(const Event&)>;
  bool receive(const OnEvent& on_event, const Reply* last = nullptr);
  /// Receives until the reply is there; false at the deadline. Throws Aborted if the store has
  /// gone. Only while no other thread receives.
  bool await(const Pending& pending, Clock::time_point until, const OnEvent& on_event);

 private:
  Pending request(Header header, std::string_view name, std::span<const std::byte> blob);
  /// Fills in the lengths. Throws as require_lengths.
  void send(Header header, std::string_view name, std::span<const std::byte> blob);

  const int rank_;
  const double stall_s_;
  Channel channel_;
  std::mutex sending_, receiving_, requests_;
  bool stuck_ = false;  ///< a message was not accepted in time
  uint64_t next_ = 1;
  std::unordered_map<uint64_t, Pending> pending_;
};

}  // namespace tandem::control
