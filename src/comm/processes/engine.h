// Engine of this process in a world of processes. Its communication thread moves everything that is
// not shared memory, so transfers progress while the application computes, and makes every MPI call
// if the world is MPI's. It connects to the others when the first run begins and disconnects at
// process exit; each call of `run`, and each World, is a numbered run with its own communicators,
// aborts and messages, and a late message of an earlier run is dropped.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/processes/bootstrap.h"
#include "comm/processes/event_fd.h"
#include "comm/processes/futex_waiter.h"
#include "comm/processes/shared_memory.h"
#include "comm/processes/transport.h"
#include "core/fork.h"

namespace tandem::processes {

struct AbortNotice {
  int origin;
  std::string reason;
};

class Engine final : TransportSink {
 public:
  using Blob = std::vector<std::byte>;

  /// Collective, as is the next constructor: throws Mismatch, on all ranks, if settings differ, and
  /// what the bootstrap throws.
  explicit Engine(std::unique_ptr<Bootstrap> bootstrap);
  /// Creates the bootstrap by `start` on the communication thread, if only that may use it.
  using Start = std::function<std::unique_ptr<Bootstrap>(Engine& starting)>;
  explicit Engine(const Start& start);
  ~Engine() override;

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::string_view transport() const { return bootstrap_->transport(); }
  const Bootstrap& bootstrap() const { return *bootstrap_; }
  /// Disconnects from the other ranks and ends the communication thread.
  void leave();
  /// Whether ordinary loads and stores can reach that rank's symmetric memory.
  bool shares_memory(int world_rank) const { return waiters_[size_t(world_rank)] != nullptr; }
  const char* transport_name() const { return transport_->name(); }
  size_t chunk_bytes() const { return transport_->chunk_bytes(); }

  /// First communicator id of the current run that is unused on this rank.
  uint64_t next_id() const { return next_id_; }
  void set_next_id(uint64_t id) { next_id_ = id; }

  /// Starts a run and returns its number. Throws InvalidArgument if another one is open.
  uint64_t begin_run();
  void end_run(bool failed);

  void add_buffer(uint64_t communicator, uint64_t buffer, std::shared_ptr<LocalBuffer> memory);
  void remove_buffer(uint64_t communicator, uint64_t buffer);

  void post(int world_rank, std::unique_ptr<Outgoing> message, bool first = false);
  /// Runs `work` on the communication thread, which is the only one that may call MPI, and returns
  /// true when it has ended; false at the deadline. `work` owns what it accesses: a collective that
  /// waits for a lost rank may outlive the call.
  bool call(std::function<void()> work, FutexWaiter::Clock::time_point deadline);
  /// Sends all ranks the run's first abort that this rank knows: this one, unless others have
  /// aborted before. `origin`: rank that caused it; -1: this one.
  void abort(const std::string& reason, int origin = -1);
  bool run_aborted() const { return run_aborted_.load(std::memory_order_acquire); }
  /// Whether a wait of this run has passed its deadline, so undelivered messages have had their
  /// time.
  bool run_timed_out() const { return run_timed_out_.load(std::memory_order_relaxed); }
  void note_timeout() { run_timed_out_.store(true, std::memory_order_relaxed); }
  /// Makes the communication thread check all pending work, including cancelled puts.
  void wake() { event_fd_.wake(); }
  std::optional<AbortNotice> aborted() const;
  /// Whether that rank has ended the current run: what it has not sent will not arrive.
  bool has_ended(int world_rank) const {
    return ended_[size_t(world_rank)].load(std::memory_order_acquire) >= run_;
  }

  /// Removes and returns the blob of `source` in exchange number `epoch`; nullopt: not arrived yet.
  std::optional<Blob> take_blob(uint64_t communicator, uint64_t epoch, int source);

  void ring(int world_rank) { waiters_[size_t(world_rank)]->ring(); }
  /// Sleeps until `ready()`, an abort or the deadline; true if `ready()`. `by_message`: the awaited
  /// change arrives through the communication thread. `checked`: throws what a wait check throws.
  template <class Ready>
  bool wait(Ready ready, FutexWaiter::Clock::time_point deadline, bool by_message,
            bool checked = false) {
    const Expectation expected(by_message && transport_->polls() ? this : nullptr);
    const auto stop = [&] { return ready() || run_aborted(); };
    waiters_[size_t(rank_)]->wait(stop, deadline, spins_, checked);
    return ready();
  }

 private:
  struct Posted {
    int peer;
    bool first;
    std::unique_ptr<Outgoing> message;
  };
  using BlobKey = std::tuple<uint64_t, uint64_t, int>;

  struct Expectation {
    Engine* const engine;
    explicit Expectation(Engine* engine_) : engine(engine_) {
      if (engine) engine->expect(+1);
    }
    ~Expectation() {
      if (engine) engine->expect(-1);
    }
  };

  void find_the_others(std::unique_ptr<Bootstrap> bootstrap);
  void start_and_serve(const Start& start);
  void serve();
  void share_memory();
  std::unique_ptr<Transport> make_transport();
  bool run_call();
  bool take_posted();
  void say_goodbye();
  void expect(int change);
  void note_abort(uint64_t run, int origin, const std::string& reason);
  void note_end(int source, uint64_t run);
  /// Sends to all other ranks.
  void tell(MessageKind kind, uint64_t run, std::string_view text, bool first, int origin = 0);
  std::string describe_absent() const;

  std::shared_ptr<LocalBuffer> find_buffer(const Header& header) override;
  void on_put(LocalBuffer& buffer, const Header& header) override;
  void on_message(int source, const Header& header, std::vector<std::byte> contents) override;
  void on_sent() override;
  void on_lost(int source) override;

  int rank_ = 0, size_ = 1;
  uint64_t next_id_ = 0;
  int spins_ = 0;
  std::shared_ptr<SharedMemory> control_;
  std::vector<std::shared_ptr<SharedMemory>> peer_controls_;
  std::vector<FutexWaiter*> waiters_;

  EventFd event_fd_;
  mutable std::mutex mutex_;
  std::condition_variable start_, called_;
  std::vector<Posted> posted_;
  std::function<void()> call_;  // requested, not begun
  bool calling_ = false;        // begun or requested
  std::map<std::pair<uint64_t, uint64_t>, std::shared_ptr<LocalBuffer>> buffers_;
  std::map<BlobKey, Blob> blobs_;
  std::map<uint64_t, AbortNotice> aborts_;
  std::optional<uint64_t> announced_abort_;   // run whose abort was sent to all
  std::vector<std::atomic<uint64_t>> ended_;  // last run that each rank has ended
  uint64_t run_ = 0;
  bool started_ = false, stopping_ = false, running_ = false, failed_ = false;
  int expecting_ = 0;
  std::exception_ptr start_error_;
  std::atomic<bool> run_aborted_{false}, run_timed_out_{false};

  std::unique_ptr<Bootstrap> bootstrap_;
  std::unique_ptr<Transport>
      transport_;  // this and the next: used only by the communication thread once started
  std::vector<bool> left_;
  const ProcessMark process_;
  std::thread thread_;
};

}  // namespace tandem::processes
