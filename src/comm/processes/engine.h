// Engine of a rank in a world of processes. Its communication thread moves everything that is not
// shared memory, so transfers progress while the application computes, makes every MPI call if the
// world is MPI's, and receives from the world's rendezvous store. It joins the store at the start,
// in a number of steps that does not depend on the world's size, and leaves it at process exit.
// Other ranks are connected to when something is first sent to them. Each call of `run`, and each
// World, is a numbered run with its own communicators, aborts and messages; a late message of an
// earlier run is dropped.
//
// Keys of the store: member/RANK, leased (its loss is a lost rank); abort/RUN (int32 rank, reason);
// ended/RANK, the last run that it has ended; address/RANK (PeerAddress); ranks/HOST and
// waiters/HOST, the ranks of a host and the memory of their futex waiters; buffer/…, shared memory.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "comm/processes/bootstrap.h"
#include "comm/processes/shared/futex_waiter.h"
#include "comm/processes/shared/shared_memory.h"
#include "comm/processes/tcp/event_fd.h"
#include "comm/processes/tcp/peer_address.h"
#include "comm/processes/transport.h"
#include "comm/rendezvous/store_client.h"
#include "core/system/process/fork.h"

namespace tandem::processes {

/// A communicator's id has its run from this bit on.
constexpr int kRunShift = 40;
/// Number of a communicator's workspace among its buffers: each rank makes it when it needs it.
constexpr uint64_t kWorkspaceBuffer = ~uint64_t{0};

using control::AbortNotice;

class Engine final : TransportSink {
 public:
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
  /// Reads the addresses of ranks, so that `shares_memory` and `post` know them. Throws Timeout.
  void learn(std::span<const int> world_ranks, FutexWaiter::Clock::time_point deadline);
  /// Whether ordinary loads and stores can reach the symmetric memory of a rank that was learnt.
  bool shares_memory(int world_rank) const;
  uint64_t host() const { return host_; }
  const char* transport_name() const { return transport_->name(); }
  size_t chunk_bytes() const { return transport_->chunk_bytes(); }

  control::StoreClient& store() { return *store_; }
  /// Waits for a reply of the store; false at the deadline or after an abort. Throws what a wait
  /// check throws.
  bool await(const control::StoreClient::Pending& reply, FutexWaiter::Clock::time_point deadline);

  /// Id in the current run of the group of that unique name; equal on all its ranks. Throws
  /// Unsupported if another group of this rank has it by chance.
  uint64_t add_group(const std::string& name);

  /// Starts a run and returns its number. Throws InvalidArgument if another one is open.
  uint64_t begin_run();
  void end_run(bool failed);

  void add_buffer(uint64_t communicator, uint64_t buffer, std::shared_ptr<LocalBuffer> memory);
  void remove_buffer(uint64_t communicator, uint64_t buffer);
  /// Keeps memory open until the next run, for ranks of this host that map it later.
  void keep(std::shared_ptr<SharedMemory> memory) {
    std::lock_guard lock(mutex_);
    late_memory_.push_back(std::move(memory));
  }

  /// Sends to a rank that was learnt.
  void post(int world_rank, std::unique_ptr<Outgoing> message);
  /// Runs `work` on the communication thread, which is the only one that may call MPI, and returns
  /// true when it has ended; false at the deadline. `work` owns what it accesses: a collective that
  /// waits for a lost rank may outlive the call.
  bool call(std::function<void()> work, FutexWaiter::Clock::time_point deadline);
  /// Tells all ranks, unless this one has heard of an abort of this run from the store. `origin`:
  /// rank that caused it; -1: this one.
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

  /// Asks the store whether that rank has ended the current run, which nothing else reports.
  void ask_whether_ended(int world_rank, FutexWaiter::Clock::time_point deadline);

  void ring(int world_rank) { waiter(world_rank).ring(); }
  /// Sleeps until `ready()`, an abort or the deadline; true if `ready()`. `by_message`: the awaited
  /// change arrives through the communication thread. `checked`: throws what a wait check throws.
  template <class Ready>
  bool wait(Ready ready, FutexWaiter::Clock::time_point deadline, bool by_message,
            bool checked = false) {
    const Expectation expected(by_message && transport_->polls() ? this : nullptr);
    const auto stop = [&] { return ready() || run_aborted(); };
    waiter(rank_).wait(stop, deadline, spins_, checked);
    return ready();
  }

 private:
  static constexpr size_t kWaiterBytes = 64;
  struct Posted {
    int peer;
    std::unique_ptr<Outgoing> message;
  };

  struct Expectation {
    Engine* const engine;
    explicit Expectation(Engine* engine_) : engine(engine_) {
      if (engine) engine->expect(+1);
    }
    ~Expectation() {
      if (engine) engine->expect(-1);
    }
  };

  FutexWaiter& waiter(int world_rank) const {
    return *reinterpret_cast<FutexWaiter*>(waiters_ + size_t(world_rank) * kWaiterBytes);
  }

  void find_the_others(std::unique_ptr<Bootstrap> bootstrap);
  /// Waits for a reply while no communication thread receives. Throws Timeout, and Aborted if a
  /// rank is lost or has failed.
  void await_at_start(std::string_view what, const control::StoreClient::Pending& reply);
  control::Met meet_at_start(std::string_view what, std::string_view compared);
  void require_same_program();
  void share_memory();
  /// Creates the memory of this host's waiters if this rank is its first, else opens it. False if
  /// it cannot be shared.
  bool open_waiters();
  std::unique_ptr<Transport> make_transport();
  /// Secret of the world's connections, from rank 0.
  Digest connection_secret();

  void start_and_serve(const Start& start);
  void serve();
  bool serve_once();
  void note_failure(const std::string& what);
  bool run_call();
  bool take_posted();
  bool take_from_store();
  bool receive_from_store();
  /// Receives from the store on the caller's thread until the reply is there; otherwise as await.
  bool receive_until(const control::StoreClient::Reply& reply,
                     FutexWaiter::Clock::time_point deadline);
  void note_store_gone();
  void check_lost_connections();
  void check_corrupt_messages();
  std::chrono::microseconds renewal_time() const;
  void renew_lease();
  void say_goodbye();
  void expect(int change);
  void notify_abort(uint64_t run, const std::string& reason, int origin);
  void note_abort(uint64_t run, int origin, const std::string& reason);
  void note_lost(int source);
  void on_event(const control::Event& event);
  std::string describe_absent();

  std::shared_ptr<LocalBuffer> find_buffer(const Header& header) override;
  void on_put(LocalBuffer& buffer, const Header& header) override;
  void note_corrupt(uint64_t run, std::string text);
  void on_corrupt(int source, const Header& header) override;
  void on_corrupt_header(int source) override;
  bool is_early(const Header& header) override;
  void on_sent() override;
  void on_lost(int source) override;
  void on_unreachable(int peer, const std::string& why) override;

  int rank_ = 0, size_ = 1;
  int spins_ = 0;
  uint64_t host_ = 0;
  bool one_host_ = false;       ///< all ranks are on this host, and agree on sharing memory
  bool memory_shared_ = false;  ///< this rank's, with others of its host that say so, too
  std::shared_ptr<SharedMemory> waiter_memory_;
  std::byte* waiters_ = nullptr;  ///< by world rank; if memory is not shared, of this rank only
  std::unordered_map<int, PeerAddress> addresses_;

  EventFd event_fd_;
  mutable std::mutex mutex_;
  std::condition_variable start_, called_;
  std::vector<Posted> posted_;
  std::function<void()> call_;  // requested, not begun
  bool calling_ = false;        // begun or requested
  std::map<std::pair<uint64_t, uint64_t>, std::shared_ptr<LocalBuffer>> buffers_;
  std::vector<std::shared_ptr<SharedMemory>> late_memory_;
  std::unordered_set<uint64_t> early_closed_;         ///< groups whose workspace is gone
  std::unordered_map<uint64_t, std::string> groups_;  ///< names, by id
  std::map<uint64_t, AbortNotice> aborts_;
  std::optional<uint64_t> announced_abort_;   // run whose abort all ranks are told of
  std::vector<std::atomic<uint64_t>> ended_;  // last run that each rank has ended
  uint64_t run_ = 0;
  bool started_ = false, stopping_ = false, running_ = false, failed_ = false;
  int expecting_ = 0;
  std::exception_ptr start_error_;
  std::optional<std::string> thread_failure_;  ///< written by the communication thread
  std::atomic<bool> run_aborted_{false}, run_timed_out_{false};

  std::unique_ptr<Bootstrap> bootstrap_;
  std::unique_ptr<control::StoreClient> store_;
  std::unique_ptr<Transport>
      transport_;  // this and the next: used only by the communication thread once started
  /// Connections that have ended without a word of the store, and when.
  std::map<int, FutexWaiter::Clock::time_point> lost_connections_;
  struct CorruptMessage {
    FutexWaiter::Clock::time_point time;
    uint64_t run;
    std::string text;
  };
  std::deque<CorruptMessage> corrupt_messages_;
  uint64_t corrupt_run_ = ~uint64_t(0);  ///< whose signals no longer reach this rank
  FutexWaiter::Clock::time_point renewed_{};
  std::atomic<bool> store_gone_{false};
  std::mutex receiving_;                      ///< held to receive from the store
  std::atomic<bool> caller_receives_{false};  ///< a thread in `await`, from the store
  const ProcessMark process_;
  std::thread thread_;
};

}  // namespace tandem::processes
