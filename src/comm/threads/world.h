// State shared by the ranks (threads) of one World or `run_threads`. A Group is the shared state of
// one communicator; a SharedWorld lists all its groups so that an abort wakes every waiter.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/threads/futex_waiter.h"
#include "comm/threads/link.h"
#include "tandem/communicator.h"

namespace tandem::threads {

struct Group;

class SharedWorld {
 public:
  explicit SharedWorld(const WorldOptions& options);

  void abort(int origin, const std::string& reason);
  const std::atomic<bool>& aborted() const { return aborted_; }
  /// Throws Aborted with the first abort's rank and reason.
  [[noreturn]] void throw_aborted() const;

  void add(Group* group);
  void remove(Group* group);

  /// Emulated link on which world rank `rank` sends; nullptr without one.
  Link* link_of(int rank) const { return link ? links_[size_t(rank)].get() : nullptr; }

  /// Ends the links' threads. Their queues own groups, which own this: without it nothing would be
  /// freed. The links remain valid for a communicator that is destroyed later.
  void close() {
    for (const auto& each : links_) each->close();
  }

  const std::optional<EmulatedLink> link;
  const int spins;  ///< polls of a signal before sleeping

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> aborted_{false};
  int origin_ = -1;
  std::string reason_;
  std::vector<Group*> groups_;
  std::vector<std::unique_ptr<Link>> links_;
};

/// Symmetric allocation: every rank's memory and signals.
class Segments {
 public:
  Segments(int ranks, size_t bytes, int signals);
  std::byte* memory(int rank) const { return segments_[size_t(rank)].memory.get(); }
  SignalWord& signal(int rank, int index) const {
    return segments_[size_t(rank)].signals[index].word;
  }

 private:
  struct alignas(64) PaddedSignal {
    SignalWord word{0};
  };
  struct RankSegment {
    std::shared_ptr<std::byte> memory;
    std::unique_ptr<PaddedSignal[]> signals;
  };
  std::vector<RankSegment> segments_;
};

struct Group {
  Group(std::shared_ptr<SharedWorld> world_, std::vector<int> world_ranks_);
  ~Group();

  /// Returns what the first of `takers` ranks to request `name` made, or rethrows its error; stored
  /// until all have taken it. Never blocks.
  std::shared_ptr<void> obtain(const std::string& name, int takers,
                               const std::function<std::shared_ptr<void>()>& make);

  const std::shared_ptr<SharedWorld> world;
  const std::vector<int> world_ranks;
  std::vector<FutexWaiter> waiters;

 private:
  struct Made {
    std::shared_ptr<void> value;
    std::exception_ptr failure;
    int left;
  };
  std::mutex mutex_;
  std::map<std::string, Made> made_;
};

}  // namespace tandem::threads
