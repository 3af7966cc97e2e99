// WorldState: world state that this process's ranks of one World share. It lives as long as any of
// them.
//
// Ranks may destroy communicators at any time and in any order, so destruction must not wait for
// other ranks. NCCL communicators have to be destroyed on all ranks together: their destruction
// waits for the peers in other processes. If all ranks belong to this process they are destroyed at
// once. Otherwise they are stored here until this process's last communicator of the world is
// destroyed, which then waits for the other processes.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/world/new_worlds.h"

namespace tandem {

class WorldState {
 public:
  /// `controls`: control communicators of this process's ranks, which agree on the end.
  explicit WorldState(Communicators controls) : controls_(std::move(controls)) {}
  /// Adds a rank to this process's world state of that name, creating it if needed.
  static std::shared_ptr<WorldState> join(const std::string& name,
                                          std::shared_ptr<Communicator> control);
  /// Waits for the other processes, for at most one deadline, if anything is stored. The ranks'
  /// control communicators end concurrently, as each may wait for the others.
  ~WorldState();
  WorldState(const WorldState&) = delete;
  WorldState& operator=(const WorldState&) = delete;

  /// `together`: all ranks are present. False if one has failed or did not arrive within the
  /// deadline.
  using End = std::function<void(bool together)>;
  /// Calls `end` at once or at the end of the world, in the order given. Thread-safe.
  void end_with_all(End end);

 private:
  bool is_all() const { return int(controls_.size()) == controls_.front()->size(); }
  bool await_all() const;
  void release_controls();

  std::mutex mutex_;
  Communicators controls_;
  std::vector<End> ends_;
};

}  // namespace tandem
