// Engine that runs for as long as requests come: other threads of rank 0 submit and cancel them,
// and all ranks step together.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "engine/infer/engine.h"
#include "overlap/contract/receipt.h"
#include "tandem/communicator.h"

namespace tandem {

class ServeLoop {
 public:
  struct Stats {
    int64_t unfinished = 0;  ///< requests that run or wait
    int64_t pages_used = 0, pages = 0;
    int64_t steps = 0, rows = 0, preempted = 0, shared_tokens = 0;  ///< as the engine's
    std::vector<Receipt> receipts = {};  ///< of rank 0's operators that steps have called
  };
  /// Receives the tokens of each step on rank 0, on the thread of `run`.
  using Listener = std::function<void(std::vector<TokenEvent>)>;

  /// Max number of requests that run or wait.
  explicit ServeLoop(int64_t max_unfinished) : max_unfinished_(max_unfinished) {}
  int64_t max_unfinished() const { return max_unfinished_; }

  /// Numbers of the requests, all or none: empty if they are too many, or after `end`. The requests
  /// must be valid (`check`). Any thread of rank 0, as the functions below.
  std::vector<int64_t> submit(std::vector<Request> requests);
  /// Drops a request that is not finished.
  void cancel(int64_t request);
  /// Lets `run` return once the requests so far are finished.
  void end();
  Stats stats() const;
  /// Whether no further request is taken.
  bool is_ending() const;

  /// Collective. Steps `engine`, to which nothing has been submitted, until `end`.
  void run(Communicator& tp, Engine& engine, const Listener& listener);

 private:
  struct Command {
    int64_t request = 0;
    bool cancels = false;
    Request content = {};  ///< of one that is submitted
  };
  struct Commands {
    std::vector<Command> list;
    bool ends = false;
  };
  /// Commands of rank 0, on each rank.
  static Commands exchange(Communicator& tp, Commands commands, bool is_idle);
  static std::vector<std::byte> encode(const Commands& commands);
  static Commands decode(std::span<const std::byte> blob);
  /// Commands since the last call; if `is_idle`, waits a while for one.
  Commands take(bool is_idle, double max_s);
  /// Sets the stats after a step, which had these events.
  void count(const Engine& engine, int64_t num_cancelled, std::span<const TokenEvent> events);

  const int64_t max_unfinished_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Commands commands_;
  int64_t next_ = 0;
  Stats stats_;
  std::chrono::steady_clock::time_point receipts_listed_;
};

}  // namespace tandem
