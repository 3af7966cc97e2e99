// HeldWorld: what this process's ranks of one World stand on, for as long as any of them lives.
//
// Ranks let go of their communicators when they like, and in any order, so to let go waits for no
// other rank. Some things have to end on all ranks, as a communicator of NCCL's, whose end waits
// for the peers in other processes, or a split's control plane, whose hub others may still use.
// Where all ranks are this process's they end at once. Otherwise they are kept here until this
// process's last communicator of the world has gone, which then waits for the other processes'.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/new_worlds.h"

namespace tandem {

class HeldWorld {
 public:
  /// `controls`: of this process's ranks. They agree on the end.
  explicit HeldWorld(Communicators controls) : controls_(std::move(controls)) {}
  /// This process's one of that name, which gets one more rank.
  static std::shared_ptr<HeldWorld> join(const std::string& name,
                                         std::shared_ptr<Communicator> control);
  /// Waits for the other processes, for one deadline at most, where anything is kept.
  ~HeldWorld();
  HeldWorld(const HeldWorld&) = delete;
  HeldWorld& operator=(const HeldWorld&) = delete;

  /// `together`: all ranks are there. Else one has failed, or has not come within the deadline.
  using End = std::function<void(bool together)>;
  /// Any thread. Called at once or at the end, in the order in which they were given.
  void end_with_all(End end);

 private:
  bool is_all() const { return int(controls_.size()) == controls_.front()->size(); }
  bool meet() const;

  std::mutex mutex_;
  Communicators controls_;  // go last
  std::vector<End> ends_;
};

}  // namespace tandem
