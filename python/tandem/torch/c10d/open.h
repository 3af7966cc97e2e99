// Process groups of this process, for its end.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace tandem_c10d {

class TandemBackend;

class Open {
 public:
  void insert(TandemBackend* backend) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.insert(backend);
  }
  void erase(TandemBackend* backend) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.erase(backend);
  }
  std::set<TandemBackend*> all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return all_;
  }
  /// Leaves a world without waiting for its other ranks, which may leave theirs in another order.
  void leave(std::shared_ptr<void> world) {
    const std::lock_guard<std::mutex> lock(mutex_);
    leaving_.emplace_back([world = std::move(world)]() mutable { world.reset(); });
  }
  /// Returns once all worlds are left.
  void join() {
    std::vector<std::thread> leaving;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      leaving = std::exchange(leaving_, {});
    }
    for (std::thread& thread : leaving) thread.join();
  }

 private:
  std::mutex mutex_;
  std::set<TandemBackend*> all_;
  std::vector<std::thread> leaving_;
};

inline Open& open_backends() {
  static auto* const open = new Open;  // a backend may end after static objects
  return *open;
}

}  // namespace tandem_c10d
